// Messages over a library of tagged messages (messenger.h): UCX, or an MPI.
//
// Theory of operation. Each direction of a channel has two tags, which its receiver has given out: one for *letters*
// and one for *chunks*. A letter is the header of a message, with the whole payload behind it if that is small. A
// larger payload follows in chunks of one length (the last one is what is left), which both sides know by the kind of
// the message: see `Cut`. As libraries keep messages of one tag in order, nothing else need be said.
//
// Letters are buffered by credit. The receiver has posted room for `most_letters`, and those of acknowledgement
// besides; the sender has never more than that on the way, so that each letter finds its room and no library has to
// keep what nobody expects. What has been consumed is told along with letters the other way, or, when half of the
// credit is used up and nothing goes there, by a letter of its own, which costs no credit: at most two of those can be
// on the way, as the second half must be used up in between.
//
// Chunks are sent from where the payload lies, if it lies in one piece, and else from stages; they are received to
// where they belong by a plain `read`, if a chunk fits there, and else in stages, where a reduction looks at them. A
// stage fits the second-level cache. Several chunks are on the way at a time, and of those that need no
// stage many, so that a rank that comes back to its core finds much to do. Point-to-point messages lie in one piece on
// both sides, and a library moves such a one best if it is given it whole; only the longest are cut, so that what is
// on the way when a call fails does not take long to end. A library moves chunks only when the receiver has posted
// room, so that a rank that does not receive is not flooded with more than `Cut::most` of them.
//
// The socket over which the ranks have agreed on the channel stays open as the witness of the peer's life: libraries
// tell of its end late, or never. It may tell before the last messages have come, so the end counts only after a time
// in which nothing came. All lengths from the peer are checked before they are used.
//
// What is still on the way when a channel closes is given a moment, then cancelled, and what cannot be cancelled keeps
// its memory for ever: a library may write to it at any time. The same holds for the memory of callers whose calls have
// failed, which `let_go` tells of.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "channel.h"
#include "descriptor.h"
#include "messenger.h"

namespace unisono {

class TaggedChannel final : public Channel {
 public:
  static constexpr std::size_t chunk_nbytes = 256 << 10;
  static constexpr std::size_t letter_nbytes = 4032;  // which libraries send without asking first
  static constexpr std::size_t most_letters = 8;
  static constexpr std::size_t most_stages = 4;

  // The chunks of a large message: the bytes of each, and how many may be on the way at a time.
  struct Cut {
    std::size_t nbytes;
    std::size_t most;
  };
  static constexpr Cut of_collectives{chunk_nbytes, 32};
  static constexpr Cut of_point_to_point{16 << 20, 2};
  static constexpr const Cut& cut_of(const Header& header) {
    return header.kind == kind_point_to_point ? of_point_to_point : of_collectives;
  }

  // How the peer is reached: its tag is the one that it has reserved, and ours the one that we have.
  struct Route {
    Messenger::Peer peer;
    std::uint64_t out_tag;
    std::uint64_t in_tag;
  };

  TaggedChannel(std::int32_t peer, std::shared_ptr<Messenger> messenger, const Route& route, Descriptor socket);
  ~TaggedChannel() override;

  bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override;
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host) override;
  // What is small goes in a letter, which is put together by the processor.
  bool takes(MemoryType memory, std::uint64_t nbytes) const override {
    return Channel::takes(memory, nbytes) || (!is_small(nbytes) && messenger_->knows(memory));
  }
  bool stirs(bool, bool) const override { return true; }  // only the library knows
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override {}
  std::chrono::microseconds doze() const override;
  std::uint32_t patience() const override { return messenger_->patience(); }
  bool let_go(std::chrono::steady_clock::time_point until) override;

 private:
  using Clock = std::chrono::steady_clock;

  struct LetterHead {
    Header header;
    std::uint32_t acknowledged;  // letters of the other direction that have been consumed, modulo 2^32
    std::uint32_t type;
  };
  static constexpr std::uint32_t message_letter = 0x554e4931;
  static constexpr std::uint32_t acknowledgement_letter = 0x554e4932;
  static constexpr std::size_t small_nbytes = letter_nbytes - sizeof(LetterHead);
  static constexpr std::size_t letter_rooms = most_letters + 2;

  struct Letter {
    Ticket ticket;
    alignas(16) std::array<std::byte, letter_nbytes> bytes;

    LetterHead head() const;
  };
  struct Chunk {
    Ticket ticket;
    std::size_t nbytes = 0;
    std::size_t used = 0;                  // of a stage
    std::byte* direct = nullptr;           // where it lies, or
    std::unique_ptr<std::byte[]> stage{};  // the room for it
  };
  using Chunks = std::deque<std::unique_ptr<Chunk>>;

  bool ended(Ticket& ticket);
  static bool is_small(std::uint64_t nbytes) { return nbytes <= small_nbytes; }
  static std::size_t chunk_at(std::uint64_t position, const Header& header);

  Letter* free_letter();
  void post(Letter& letter, std::size_t nbytes);
  void acknowledge();
  void note_acknowledged(std::uint32_t acknowledged);
  void send_whole();
  bool room_to_stage();
  void send_stage();
  void reap_sent();

  void expect(std::unique_ptr<Letter> room);
  void take_letters();
  bool take_letter(const Letter& letter);
  void open_front();
  void end_message();
  void post_chunk(std::byte* direct, MemoryType memory);
  Chunk* front_chunk();
  void use(Chunk& chunk, std::size_t nbytes);
  [[noreturn]] void refuse(const char* what) const;

  template <class Kept>
  bool finish(Kept& kept, Clock::time_point until);

  const pid_t process_ = ::getpid();
  std::shared_ptr<Messenger> messenger_;
  const Route route_;
  Descriptor socket_;
  bool asleep_ = true;                            // whether the thread that has asked may sleep
  bool broken_ = false;                           // the library says that the peer cannot be reached any more
  std::optional<Clock::time_point> quiet_since_;  // since the peer has hung up
  std::vector<std::unique_ptr<std::byte[]>> spare_stages_;

  // Sending.
  std::vector<std::unique_ptr<Letter>> out_letters_;
  Letter* out_letter_ = nullptr;  // that of the message, while its payload is being put together
  std::uint32_t sent_letters_ = 0;
  std::uint32_t acknowledged_letters_ = 0;
  Header out_header_{};
  std::uint64_t out_taken_ = 0;  // of the payload
  std::uint64_t out_sent_ = 0;   // of it: given to the library
  const std::byte* whole_ = nullptr;
  MemoryType whole_memory_ = MemoryType::host;
  std::unique_ptr<Chunk> out_stage_;  // being filled
  Chunks out_chunks_;

  // Receiving.
  std::deque<std::unique_ptr<Letter>> rooms_;  // posted, in the order in which they will be filled
  std::deque<std::unique_ptr<Letter>> arrived_;
  std::uint32_t consumed_letters_ = 0;
  std::uint32_t told_letters_ = 0;  // of those, the sender has been told
  Header in_header_{};
  bool message_open_ = false;
  std::uint64_t in_posted_ = 0;  // of the payload, room has been posted for
  std::uint64_t in_done_ = 0;
  Chunks in_chunks_;
};

}  // namespace unisono
