// `TaggedChannel`: messages over a library of tagged messages (messenger.h), which is UCX or an MPI.
//
// Theory of operation
// -------------------
// Each direction of a channel has two tags, which its receiver has reserved: one for *envelopes* and one for *chunks*.
// An envelope is the header of a message, followed by the whole payload if that is small. A larger payload follows in
// chunks of one length, of which only the last may be shorter. Both sides derive that length from the kind of message
// (`Cut`). Libraries keep the order of messages with one tag, so the two sides exchange nothing else.
//
// Credit. The receiver has posted memory for `most_envelopes`, and for the acknowledgements besides. The sender never
// has more of them under way, so each envelope finds its memory, and the library never buffers an unexpected message.
// The receiver acknowledges consumed envelopes in the envelopes of its own messages. If half of the credit is used up
// before it sends a message, it sends an envelope that only acknowledges, which costs no credit. At most two of these
// can be under way, because the second half must be used up in between.
//
// Chunks. The sender sends chunks from where the payload lies if it lies in one piece, and otherwise from stages. A
// plain `read` receives a chunk into its destination if the whole chunk fits there. Other chunks go to stages, where a
// reduction reads them. A stage fits the second-level cache. Several chunks are under way at a time, and many if they
// need no stage. So a rank that another process has kept from its core finds many chunks that have arrived meanwhile.
//
// Point-to-point messages lie in one piece on both sides, and a library moves them best as a whole. Only the longest
// are cut, so that a transfer under way does not take long to end when a call fails. A library moves chunks only when
// the receiver has posted memory. So at most `Cut::most` chunks wait for a rank that does not receive.
//
// Peer's end. The socket over which the ranks have agreed on the channel stays open, because libraries report a peer's
// end late or never. The socket may close before the last messages have arrived. So the end counts only after a time in
// which nothing arrived. All lengths from the peer are checked before use.
//
// Closing. Transfers that are under way when a channel closes get some time, and are then cancelled. The memory of a
// transfer that cannot be cancelled is never freed, because the library may write to it at any time. The same holds for
// memory of callers whose calls have failed: see `release_memory`.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "endpoint/channel.h"
#include "system/descriptor.h"
#include "tagged/messenger.h"

namespace unisono {

//! A channel whose messages travel as tagged messages of a library.
class TaggedChannel final : public Channel {
 public:
  static constexpr std::size_t chunk_nbytes = 256 << 10;
  static constexpr std::size_t envelope_nbytes = 4032;  // libraries send messages of this length eagerly
  static constexpr std::size_t most_envelopes = 8;
  static constexpr std::size_t most_stages = 4;

  //! The length of a large message's chunks, and how many may be under way at a time.
  struct Cut {
    std::size_t nbytes;
    std::size_t most;
  };
  static constexpr Cut of_collectives{chunk_nbytes, 32};
  static constexpr Cut of_point_to_point{16 << 20, 2};
  //! Returns how the payload of a message is cut into chunks, which depends on the kind of message.
  static constexpr const Cut& cut_of(const Header& header) {
    return header.kind == kind_point_to_point ? of_point_to_point : of_collectives;
  }

  //! The peer, the first of the two tags that the peer has reserved, and the first of those that this rank has
  //! reserved.
  struct Route {
    Messenger::Peer peer;
    std::uint64_t out_tag;
    std::uint64_t in_tag;
  };

  //! `socket` is the connection over which the two ranks agreed on the channel.
  TaggedChannel(std::int32_t peer, std::shared_ptr<Messenger> messenger, const Route& route, Descriptor socket);
  ~TaggedChannel() override;

  bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override;
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host) override;
  //! A small message goes in its envelope, which the processor writes, so it must lie on the host.
  bool accepts(MemoryType memory, std::uint64_t nbytes) const override {
    return Channel::accepts(memory, nbytes) || (!is_small(nbytes) && messenger_->supports(memory));
  }
  bool may_progress(bool, bool) const override { return true; }  // only the library can tell
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override {}
  std::chrono::microseconds max_sleep() const override;
  std::uint32_t extra_yields() const override { return messenger_->extra_yields(); }
  bool release_memory(std::chrono::steady_clock::time_point until) override;

 private:
  using Clock = std::chrono::steady_clock;

  struct EnvelopeHead {
    Header header;
    std::uint32_t acknowledged;  // envelopes of the other direction that have been consumed, modulo 2^32
    std::uint32_t type;
  };
  static constexpr std::uint32_t message_envelope = 0x554e4931;
  static constexpr std::uint32_t acknowledgement_envelope = 0x554e4932;
  static constexpr std::size_t small_nbytes = envelope_nbytes - sizeof(EnvelopeHead);
  static constexpr std::size_t envelope_rooms = most_envelopes + 2;

  struct Envelope {
    Transfer transfer;
    alignas(16) std::array<std::byte, envelope_nbytes> bytes;

    EnvelopeHead head() const;
  };
  struct Chunk {
    Transfer transfer;
    std::size_t nbytes = 0;
    std::size_t used = 0;                  // bytes of a stage that have been used
    std::byte* direct = nullptr;           // the payload's own memory, or
    std::unique_ptr<std::byte[]> stage{};  // a stage
  };
  using Chunks = std::deque<std::unique_ptr<Chunk>>;

  bool ended(Transfer& transfer);
  static bool is_small(std::uint64_t nbytes) { return nbytes <= small_nbytes; }
  static std::size_t chunk_at(std::uint64_t position, const Header& header);

  Envelope* free_envelope();
  void post(Envelope& envelope, std::size_t nbytes);
  void acknowledge();
  void note_acknowledged(std::uint32_t acknowledged);
  void send_whole();
  bool room_to_stage();
  void send_stage();
  void reap_sent();

  void expect(std::unique_ptr<Envelope> room);
  void take_envelopes();
  bool take_envelope(const Envelope& envelope);
  void open_front();
  void end_message();
  void post_chunk(std::byte* direct, MemoryType memory);
  Chunk* front_chunk();
  void use(Chunk& chunk, std::size_t nbytes);
  [[noreturn]] void refuse(const char* what) const;

  template <class Owners>
  bool finish(Owners& owners, Clock::time_point until);

  const pid_t process_ = ::getpid();
  std::shared_ptr<Messenger> messenger_;
  const Route route_;
  Descriptor socket_;
  bool asleep_ = true;                            // whether the library allows the thread to sleep
  bool broken_ = false;                           // the library reports that the peer cannot be reached any more
  std::optional<Clock::time_point> quiet_since_;  // when nothing has arrived since, after the peer hung up
  std::vector<std::unique_ptr<std::byte[]>> spare_stages_;

  // Sending.
  std::vector<std::unique_ptr<Envelope>> out_envelopes_;
  Envelope* out_envelope_ = nullptr;  // the envelope of a small message that is being filled
  std::uint32_t sent_envelopes_ = 0;
  std::uint32_t acknowledged_envelopes_ = 0;
  Header out_header_{};
  std::uint64_t out_taken_ = 0;  // bytes of the payload that `write` has taken
  std::uint64_t out_sent_ = 0;   // bytes of the payload passed to the library
  const std::byte* whole_ = nullptr;
  MemoryType whole_memory_ = MemoryType::host;
  std::unique_ptr<Chunk> out_stage_;  // being filled
  Chunks out_chunks_;

  // Receiving.
  std::deque<std::unique_ptr<Envelope>> rooms_;  // posted, in the order in which they will be filled
  std::deque<std::unique_ptr<Envelope>> arrived_;
  std::uint32_t consumed_envelopes_ = 0;
  std::uint32_t announced_envelopes_ = 0;  // consumed envelopes that this rank has acknowledged
  Header in_header_{};
  bool message_open_ = false;
  std::uint64_t in_posted_ = 0;  // bytes of the payload for which memory has been posted
  std::uint64_t in_done_ = 0;
  Chunks in_chunks_;
};

}  // namespace unisono
