// `TcpChannel`: messages over connected TCP sockets.
//
// Theory of operation
// -------------------
// A message is a header (tcp_wire.h) and then the payload, in blocks of 256 KiB, or of 64 KiB over several
// streams. If payloads are checked, a checksum follows each block. Block k travels on stream k modulo the number of
// streams, and headers on stream 0. So both sides know which bytes come where, and a small message needs one stream
// only. Each side handles the blocks in order, while the kernel's buffers keep the other streams busy.
//
// The sender gathers a small message and passes it to the kernel in one call. It sends a large one block by block from
// the caller's memory.
//
// The receiver reads ahead, so a small message costs one call too. A reduction reads its operand from the read-ahead,
// which fits the second-level cache. The payload of a large plain receive goes from the kernel directly to its
// destination, unless the read-ahead is measured to be faster (receive_policy.h). After a large message only a header
// is read ahead, so that little of the next payload is. A checked block is read ahead as a whole, and the receiver
// passes on none of it before its checksum has been verified.
//
// A stream whose connection breaks is continued over another one (tcp_stream.h). A checked block that arrives damaged
// is treated as if the connection had broken before the block. So it is sent again. If it is damaged a second time, the
// channel fails.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "endpoint/channel.h"
#include "tcp/connection.h"
#include "tcp/receive_policy.h"
#include "tcp/tcp_stream.h"
#include "tcp/tcp_wire.h"

namespace unisono {

//! Settings that both sides of a channel have agreed on.
struct TcpTerms {
  static constexpr std::size_t most_streams = 16;
  std::uint32_t epoch = 0;  // number of the job's membership
  bool checksum = false;    // whether this side sends checksums of its payloads
};

//! Messages over one or several TCP streams.
class TcpChannel final : public Channel {
 public:
  //! Takes over authenticated connections, in the same order on both sides. Throws std::invalid_argument unless
  //! there are 1 to `most_streams` of them.
  TcpChannel(std::int32_t peer, std::vector<Connection> connections, const TcpTerms& terms);

  bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override;
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host) override;
  bool may_progress(bool, bool) const override { return true; }  // only the kernel can tell
  bool polls_by_syscall() const override { return true; }
  bool closed() override;
  std::vector<BrokenStream> broken() override;
  std::vector<BrokenStream> silent(std::chrono::steady_clock::time_point now,
                                   std::chrono::steady_clock::duration limit) override;
  std::optional<StreamState> retire(const BrokenStream& stream) override;
  bool resume(std::uint32_t stream, Connection connection, const StreamState& peer) override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override {}
  std::chrono::microseconds max_sleep() const override;

 private:
  std::size_t block_remaining(std::uint64_t position, std::uint64_t nbytes) const;
  TcpStream& stream_of(std::uint64_t position);
  TcpStream* next_stream();
  void end_block();
  void check(const WireHeader& wire) const;
  bool verify(TcpStream& stream, std::size_t nbytes);
  void stage(TcpStream& stream);
  std::size_t receive(TcpStream& stream, std::byte* data, std::size_t nbytes);
  void advance_position(TcpStream& stream, std::size_t nbytes);
  void demand_again(TcpStream& stream, const char* how);
  std::string arrived(const char* how) const;

  TcpTerms terms_;
  std::size_t block_nbytes_;
  std::vector<TcpStream> streams_;

  // The stream on which bytes were sent last. Only this stream, and streams that have been resumed, can have bytes that
  // wait to be sent.
  TcpStream* out_stream_;
  bool was_resumed_ = false;      // since all streams were flushed
  std::uint32_t out_number_ = 0;  // of the next message
  std::uint64_t out_nbytes_ = 0;
  std::uint64_t out_done_ = 0;
  bool out_lasts_ = false;          // the payload stays unchanged until the message has ended
  BlockChecksum out_checksum_ = 0;  // of the current block so far

  // Receiving.
  Header in_header_{};
  std::uint32_t in_number_ = 0;  // of the next message
  std::uint64_t in_done_ = 0;    // bytes of the payload that have been consumed
  ReceivePolicy receiving_;
  StagingPolicy staging_;
  bool in_checked_ = false;
  bool block_verified_ = false;
  std::uint32_t damaged_ = 0;  // how often the data that is expected now has arrived damaged
  bool message_open_ = false;
  const TcpStream* awaited_ = nullptr;  // the stream that a thread which is about to sleep receives from
  std::size_t header_read_ahead_;       // bytes to read ahead when a header is expected
};

}  // namespace unisono
