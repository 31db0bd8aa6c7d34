// Messages over connected TCP sockets.
//
// Theory of operation. Each message is a header (tcp_wire.h) and then the payload, cut in blocks; where payloads are
// checked, a checksum follows each block. Block k travels on stream k modulo the streams, headers on stream 0, so that
// both sides know what comes where, and a small message needs one stream only. Each side moves the blocks in their
// order; the kernel's buffers keep the other streams busy meanwhile.
//
// A small message is put together and given to the kernel in one call, a large one block by block from the caller's own
// memory. Receiving reads ahead, so that a small message costs one call too, and reductions look at their operand in
// the read-ahead, which fits the second-level cache. Large payloads for plain receives go from the kernel straight to
// their destination, unless the way by the read-ahead is measured to be quicker (receive_policy.h); so that not much of
// them is read ahead, only a header is wanted after a large message. A checked block is read ahead as a whole, and
// nothing of it is handed out before its checksum has been found right.
#pragma once

#include <vector>

#include "channel.h"
#include "descriptor.h"
#include "receive_policy.h"
#include "tcp_stream.h"
#include "tcp_wire.h"

namespace unisono {

// What the two sides of a channel have agreed on.
struct TcpTerms {
  static constexpr std::size_t most_streams = 16;
  std::uint32_t epoch = 0;  // of the job's membership
  bool checksum = false;    // whether this side sends checksums of its payloads
};

class TcpChannel final : public Channel {
 public:
  // Takes over authenticated, connected sockets, in the same order on both sides. Throws std::invalid_argument if there
  // are none, or too many.
  TcpChannel(std::int32_t peer, std::vector<Descriptor> sockets, const TcpTerms& terms);

  bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override { return out_stream_->flush(); }
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host) override;
  bool stirs(bool, bool) const override { return true; }  // only the kernel knows
  bool asks_kernel() const override { return true; }
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override {}

 private:
  TcpStream& stream_of(std::uint64_t position);
  TcpStream* next_stream();
  void end_block();
  void check(const WireHeader& wire) const;
  bool verify(TcpStream& stream, std::size_t nbytes);
  void stage(TcpStream& stream);
  std::size_t receive(TcpStream& stream, std::byte* data, std::size_t nbytes);
  void moved_on(TcpStream& stream, std::size_t nbytes);
  [[noreturn]] void refuse(const char* what) const;

  TcpTerms terms_;
  std::vector<TcpStream> streams_;

  // Sending. Only the stream that was last sent on can have bytes waiting.
  TcpStream* out_stream_;
  std::uint32_t out_number_ = 0;  // of the next message
  std::uint64_t out_nbytes_ = 0;
  std::uint64_t out_done_ = 0;
  BlockChecksum out_checksum_ = 0;  // of the block so far

  // Receiving.
  Header in_header_{};
  std::uint32_t in_number_ = 0;  // of the next message
  std::uint64_t in_done_ = 0;    // of the payload
  ReceivePolicy receiving_;
  StagingPolicy staging_;
  bool in_checked_ = false;
  bool block_verified_ = false;
  bool message_open_ = false;
  std::size_t header_read_ahead_;  // what to read ahead when a header is wanted
};

}  // namespace unisono
