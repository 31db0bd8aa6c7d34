#include "tcp_channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace unisono {
namespace {

constexpr std::uint32_t magic = 0x4f534e55;  // "UNSO"
constexpr std::size_t wire_header_nbytes = 64;
constexpr std::size_t staging_nbytes = 256 << 10;
// A plain receive of at least this many bytes reads from the kernel straight into its destination.
constexpr std::size_t direct_read_nbytes = 16 << 10;

std::uint32_t checksum(const std::byte* data, std::size_t nbytes) {  // FNV-1a
  std::uint32_t hash = 2166136261u;
  for (std::size_t i = 0; i < nbytes; ++i) hash = (hash ^ static_cast<std::uint32_t>(data[i])) * 16777619u;
  return hash;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

struct TcpChannel::WireHeader {
  std::uint32_t magic;
  std::uint32_t checksum;  // of everything after it
  Header header;
  std::byte reserved[wire_header_nbytes - 8 - sizeof(Header)];
};

TcpChannel::TcpChannel(std::int32_t peer, Descriptor socket)
    : Channel(peer, "tcp"), socket_(std::move(socket)), out_header_(wire_header_nbytes), staging_(staging_nbytes) {
  static_assert(sizeof(WireHeader) == wire_header_nbytes);
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl of a channel");
}

bool TcpChannel::begin(const Header& header) {
  WireHeader wire{magic, 0, header, {}};
  std::memcpy(out_header_.data(), &wire, sizeof wire);
  wire.checksum = checksum(out_header_.data() + 8, sizeof wire - 8);
  std::memcpy(out_header_.data(), &wire, sizeof wire);
  out_header_left_ = sizeof wire;
  ++counters_.sent_messages;
  counters_.sent_nbytes += header.nbytes;
  return true;
}

std::size_t TcpChannel::send_with_header(const std::byte* data, std::size_t nbytes) {
  if (gone_) return 0;
  iovec parts[2];
  parts[0] = {out_header_.data() + (wire_header_nbytes - out_header_left_), out_header_left_};
  parts[1] = {const_cast<std::byte*>(data), nbytes};
  msghdr message{};
  message.msg_iov = out_header_left_ != 0 ? parts : parts + 1;
  message.msg_iovlen = out_header_left_ != 0 ? 2 : 1;
  const auto sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    gone_ = !would_block(errno);
    return 0;
  }
  const auto of_header = std::min(out_header_left_, static_cast<std::size_t>(sent));
  out_header_left_ -= of_header;
  return static_cast<std::size_t>(sent) - of_header;
}

std::size_t TcpChannel::write(const std::byte* data, std::size_t nbytes) { return send_with_header(data, nbytes); }

bool TcpChannel::flush() {
  if (out_header_left_ != 0) send_with_header(nullptr, 0);
  return out_header_left_ == 0;
}

std::size_t TcpChannel::receive(std::byte* data, std::size_t nbytes) {
  if (gone_) return 0;
  const auto got = ::recv(socket_.get(), data, nbytes, MSG_DONTWAIT);
  if (got > 0) return static_cast<std::size_t>(got);
  gone_ = got == 0 || !would_block(errno);
  return 0;
}

void TcpChannel::fill_staging() {
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
  if (staged_begin_ != 0 && staging_.size() - staged_end_ < wire_header_nbytes) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged());
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  staged_end_ += receive(staging_.data() + staged_end_, staging_.size() - staged_end_);
}

const Header* TcpChannel::front() {
  if (message_open_) return &in_header_;
  if (staged() < wire_header_nbytes) fill_staging();
  if (staged() < wire_header_nbytes) return nullptr;
  WireHeader wire;
  std::memcpy(&wire, staging_.data() + staged_begin_, sizeof wire);
  if (wire.magic != magic || wire.checksum != checksum(staging_.data() + staged_begin_ + 8, sizeof wire - 8))
    throw ProtocolError("a message over TCP has a damaged header");
  staged_begin_ += sizeof wire;
  in_header_ = wire.header;
  in_left_ = in_header_.nbytes;
  message_open_ = true;
  ++counters_.received_messages;
  counters_.received_nbytes += in_left_;
  return &in_header_;
}

std::span<const std::byte> TcpChannel::readable() {
  if (!message_open_ || in_left_ == 0) return {};
  if (staged() == 0) fill_staging();
  return {staging_.data() + staged_begin_, std::min(staged(), in_left_)};
}

void TcpChannel::consume(std::size_t nbytes) {
  staged_begin_ += nbytes;
  message_moved(nbytes);
}

void TcpChannel::message_moved(std::size_t nbytes) {
  in_left_ -= nbytes;
  if (in_left_ == 0) message_open_ = false;
}

std::size_t TcpChannel::read(std::byte* data, std::size_t nbytes) {
  if (staged() != 0 || nbytes < direct_read_nbytes) return Channel::read(data, nbytes);
  const std::size_t got = receive(data, std::min(nbytes, in_left_));
  if (got != 0) message_moved(got);
  return got;
}

bool TcpChannel::closed() {
  if (gone_) return true;
  char byte;
  const auto got = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !would_block(errno));
}

void TcpChannel::prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) {
  const int events = (for_send ? POLLOUT : 0) | (for_receive ? POLLIN : 0) | POLLRDHUP;
  descriptors.push_back({socket_.get(), static_cast<short>(events), 0});
}

}  // namespace unisono
