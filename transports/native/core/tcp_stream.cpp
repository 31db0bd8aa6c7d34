#include "tcp_stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <system_error>

namespace unisono {
namespace {

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// The bytes of an Internet address without the port; empty for other families.
std::string address_of(const sockaddr_storage& end) {
  const auto* bytes = reinterpret_cast<const char*>(&end);
  if (end.ss_family == AF_INET) return {bytes + offsetof(sockaddr_in, sin_addr), sizeof(in_addr)};
  if (end.ss_family == AF_INET6) return {bytes + offsetof(sockaddr_in6, sin6_addr), sizeof(in6_addr)};
  return {};
}

// Whether both ends have the same address, so that no network lies between them.
bool stays_in_the_kernel(int socket) {
  sockaddr_storage ours{};
  sockaddr_storage theirs{};
  socklen_t our_nbytes = sizeof ours;
  socklen_t their_nbytes = sizeof theirs;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&ours), &our_nbytes) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&theirs), &their_nbytes) == 0 && !address_of(ours).empty() &&
         address_of(ours) == address_of(theirs);
}

// BBR paces what it sends, which takes half as long again on a link that cannot be congested. Every kernel has Reno and
// allows it, and Reno does not pace.
void do_without_pacing(int socket) {
  static constexpr char reno[] = "reno";
  ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, reno, sizeof reno - 1);  // on failure the kernel's default stays
}

}  // namespace

TcpStream::TcpStream(Descriptor socket, std::size_t read_ahead_nbytes)
    : socket_(std::move(socket)),
      capacity_(read_ahead_nbytes),
      staging_(std::make_unique_for_overwrite<std::byte[]>(read_ahead_nbytes)) {
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl of a channel");
  if (stays_in_the_kernel(socket_.get())) do_without_pacing(socket_.get());
}

void TcpStream::append(const void* data, std::size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  waiting_.insert(waiting_.end(), bytes, bytes + nbytes);
}

std::size_t TcpStream::send(const std::byte* data, std::size_t nbytes) {
  if (gone_) return 0;
  const std::size_t waits = waiting_.size() - waiting_sent_;
  iovec parts[2] = {{waiting_.data() + waiting_sent_, waits}, {const_cast<std::byte*>(data), nbytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const auto sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    gone_ = !would_block(errno);
    return 0;
  }
  const std::size_t of_waiting = std::min(waits, static_cast<std::size_t>(sent));
  waiting_sent_ += of_waiting;
  if (waiting_sent_ == waiting_.size()) {
    waiting_.clear();
    waiting_sent_ = 0;
  }
  return static_cast<std::size_t>(sent) - of_waiting;
}

bool TcpStream::flush() {
  if (!waiting_.empty()) send(nullptr, 0);
  return waiting_.empty();
}

void TcpStream::read_ahead(std::size_t needed, std::size_t most, std::size_t lead) {
  if (begin_ == end_) {
    begin_ = end_ = lead;
  } else if (capacity_ - begin_ < needed) {
    std::memmove(staging_.get(), staging_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  end_ += receive(staging_.get() + end_, std::min(most, capacity_ - end_));
}

std::size_t TcpStream::receive(std::byte* data, std::size_t nbytes) {
  const auto got = ::recv(socket_.get(), data, nbytes, MSG_DONTWAIT);
  if (got > 0) return static_cast<std::size_t>(got);
  gone_ = got == 0 || !would_block(errno);
  return 0;
}

bool TcpStream::closed() {
  if (gone_) return true;
  char byte;
  const auto got = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !would_block(errno));
}

}  // namespace unisono
