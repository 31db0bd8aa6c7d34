// Messages over a connected TCP socket.
//
// Each message is a header of 64 bytes, which carries a magic number and a checksum of itself, and then the payload.
// Sending hands the header and the caller's own bytes to the kernel together. Receiving reads ahead into a staging
// buffer, where reductions look at their operand; large payloads for plain receives go from the kernel straight to
// their destination.
#pragma once

#include "channel.h"
#include "descriptor.h"

namespace unisono {

class TcpChannel final : public Channel {
 public:
  // Takes over an authenticated, connected socket, and makes it nonblocking.
  TcpChannel(std::int32_t peer, Descriptor socket);

  bool begin(const Header& header) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override;
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes) override;
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override {}

 private:
  struct WireHeader;

  std::size_t send_with_header(const std::byte* data, std::size_t nbytes);
  std::size_t receive(std::byte* data, std::size_t nbytes);
  void fill_staging();
  std::size_t staged() const { return staged_end_ - staged_begin_; }
  void message_moved(std::size_t nbytes);

  Descriptor socket_;
  bool gone_ = false;  // the peer closed, or the connection broke

  // Sending.
  std::vector<std::byte> out_header_;
  std::size_t out_header_left_ = 0;

  // Receiving.
  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  Header in_header_{};
  std::size_t in_left_ = 0;
  bool message_open_ = false;
};

}  // namespace unisono
