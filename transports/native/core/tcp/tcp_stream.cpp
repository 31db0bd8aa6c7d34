#include "tcp/tcp_stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

namespace unisono {
namespace {

// The sender keeps a history of up to this size without asking the kernel which part of it is acknowledged.
constexpr std::size_t most_unexamined_nbytes = 64 << 10;

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

constexpr char reno[] = "reno";
constexpr char bbr[] = "bbr";

// Sets the congestion control of a socket. If that fails, the kernel's default stays.
template <std::size_t size>
void set_congestion_control(int socket, const char (&name)[size]) {
  ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, size - 1);
}

// Sets Reno as congestion control in place of BBR. BBR paces its packets, so a transfer takes half as long again on a
// link that cannot be congested. Reno does not pace, and every kernel has and allows it.
void do_without_pacing(int socket) { set_congestion_control(socket, reno); }

bool uses_bbr(int socket) {
  std::array<char, 16> name{};  // the kernel's longest name, with its end
  socklen_t nbytes = name.size();
  return ::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &nbytes) == 0 &&
         std::strcmp(name.data(), bbr) == 0;
}

// Round trips in microseconds. From `far_us` on, the loss of few packets must not slow a stream down. Below `near_us`,
// a stream recovers soon from such a loss.
constexpr std::uint32_t far_us = 5000;
constexpr std::uint32_t near_us = 1000;
// The offset of tcpi_min_rtt, the shortest round trip, in the kernel's tcp_info. The C library declares only the
// beginning of that struct.
constexpr std::size_t min_rtt_offset = 148;
constexpr std::size_t tcp_info_nbytes = 192;
constexpr std::uint32_t unmeasured = 0xffffffff;

// The shortest round trip of a connection so far; `unmeasured` if the kernel does not know it.
std::uint32_t least_round_trip_us(int socket) {
  std::array<std::byte, tcp_info_nbytes> info{};
  socklen_t nbytes = tcp_info_nbytes;
  std::uint32_t least_us = unmeasured;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, info.data(), &nbytes) != 0) return unmeasured;
  if (nbytes < min_rtt_offset + sizeof least_us) return unmeasured;
  std::memcpy(&least_us, info.data() + min_rtt_offset, sizeof least_us);
  return least_us;
}

// Sets the congestion control that suits the round trips of a network.
//
// - Long round trips: BBR, which sends at the rate at which data arrives. Reno and CUBIC take each lost packet for
//   congestion and send less for many round trips: at 100 ms and a loss of 0.1 %, CUBIC carries 5 Mbit/s of 200.
// - Short round trips: Reno, if the kernel's default is BBR. BBR has at most some tens of KiB under way here, because
//   that is twice the rate times the shortest round trip. So the link is idle whenever a rank waits for its core. BBR
//   also stays slow for some round trips after streams have shared a link, as they do whenever ranks change partners.
void suit_round_trips(int socket) {
  const std::uint32_t least_us = least_round_trip_us(socket);
  if (least_us == unmeasured) return;
  if (least_us >= far_us) set_congestion_control(socket, bbr);
  if (least_us < near_us && uses_bbr(socket)) set_congestion_control(socket, reno);
}

}  // namespace

TcpStream::TcpStream(Connection connection, std::size_t read_ahead_nbytes, std::size_t kept_nbytes)
    : kept_nbytes_(kept_nbytes),
      capacity_(read_ahead_nbytes),
      staging_(std::make_unique_for_overwrite<std::byte[]>(read_ahead_nbytes)) {
  prepare(std::move(connection));
}

void TcpStream::prepare(Connection connection) {
  disconnect();
  socket_ = std::move(connection.socket);
  tls_ = std::move(connection.tls);
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl of a channel");
  stays_in_the_kernel_ = stays_in_the_kernel(socket_.get());
  stays_in_the_kernel_ ? do_without_pacing(socket_.get()) : suit_round_trips(socket_.get());
  silence_.reset();
}

void TcpStream::look(Silence::Clock::time_point now) {
  if (gone_ || stays_in_the_kernel_)
    silence_.reset();
  else
    silence_.look(socket_.get(), now);
}

void TcpStream::disconnect() {
  tls_.reset();
  socket_.reset();
  former_.reset();
}

void TcpStream::append(const void* data, std::size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  waiting_.insert(waiting_.end(), bytes, bytes + nbytes);
}

std::size_t TcpStream::send(const std::byte* data, std::size_t nbytes, bool lasting) {
  if (gone_) return 0;
  const std::size_t waiting_nbytes = waiting_.size() - waiting_sent_;
  const auto sent = pass_on(data, nbytes);
  if (sent < 0) {
    note_end(errno);
    return 0;
  }
  const std::size_t of_waiting = std::min(waiting_nbytes, static_cast<std::size_t>(sent));
  const std::size_t of_data = static_cast<std::size_t>(sent) - of_waiting;
  remember(waiting_.data() + waiting_sent_, of_waiting);
  lasting ? remember_lasting(data, of_data) : remember(data, of_data);
  waiting_sent_ += of_waiting;
  if (waiting_sent_ == waiting_.size()) {
    waiting_.clear();
    waiting_sent_ = 0;
  }
  return of_data;
}

// Passes the waiting bytes and then those at `data` to the kernel or to TLS. Returns how many were taken of both
// together, or -1 with errno.
ssize_t TcpStream::pass_on(const std::byte* data, std::size_t nbytes) {
  const std::size_t waiting_nbytes = waiting_.size() - waiting_sent_;
  if (tls_ != nullptr) {
    const auto of_waiting = tls_->send(waiting_.data() + waiting_sent_, waiting_nbytes);
    if (of_waiting < static_cast<ssize_t>(waiting_nbytes) || nbytes == 0) return of_waiting;
    const auto of_data = tls_->send(data, nbytes);
    return of_data < 0 && of_waiting == 0 ? of_data : of_waiting + std::max<ssize_t>(of_data, 0);
  }
  iovec parts[2] = {{waiting_.data() + waiting_sent_, waiting_nbytes}, {const_cast<std::byte*>(data), nbytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Returns how many of the last `nbytes` that were sent must be kept: those that the kernel may still send again.
// Nothing can break a connection inside one kernel, so its bytes are not kept.
std::size_t TcpStream::kept_of(std::size_t nbytes) const {
  if (stays_in_the_kernel_) return std::min(nbytes, kept_nbytes_);
  int unacknowledged = 0;
  if (nbytes <= most_unexamined_nbytes || ::ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) != 0) return nbytes;
  std::size_t not_received = static_cast<std::size_t>(unacknowledged);
  if (tls_ != nullptr) not_received += tls_->unsent_nbytes() + Tls::most_record_nbytes;
  return std::min(nbytes, std::max(not_received, kept_nbytes_));
}

void TcpStream::remember(const std::byte* data, std::size_t nbytes) {
  if (nbytes == 0) return;
  keep_lasting();
  sent_ += nbytes;
  const std::size_t kept = kept_of(history_.size() + nbytes);
  const std::size_t of_data = std::min(kept, nbytes);
  history_.keep_last(kept - of_data);
  history_.append(data + (nbytes - of_data), of_data);
}

void TcpStream::remember_lasting(const std::byte* data, std::size_t nbytes) {
  if (nbytes == 0) return;
  sent_ += nbytes;
  lasting_nbytes_ += nbytes;
  if (!lasting_.empty() && lasting_.back().data() + lasting_.back().size() == data)
    lasting_.back() = {lasting_.back().data(), lasting_.back().size() + nbytes};
  else
    lasting_.emplace_back(data, nbytes);
}

void TcpStream::keep_lasting() {
  if (lasting_.empty()) return;
  const std::size_t kept = kept_of(history_.size() + lasting_nbytes_);
  const std::size_t of_lasting = std::min(kept, lasting_nbytes_);
  history_.keep_last(kept - of_lasting);
  std::size_t skipped = std::exchange(lasting_nbytes_, 0) - of_lasting;
  for (const std::span<const std::byte> piece : std::exchange(lasting_, {})) {
    const std::size_t from = std::min(skipped, piece.size());
    history_.append(piece.data() + from, piece.size() - from);
    skipped -= from;
  }
}

bool TcpStream::flush() {
  if (waits()) send(nullptr, 0);
  return !waits();
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
  const auto got = tls_ != nullptr ? tls_->receive(data, nbytes) : ::recv(socket_.get(), data, nbytes, MSG_DONTWAIT);
  if (got > 0) {
    received_ += static_cast<std::size_t>(got);
    return static_cast<std::size_t>(got);
  }
  note_end(got == 0 ? 0 : errno);
  return 0;
}

void TcpStream::note_end(int error) {
  if (would_block(error)) return;
  gone_ = true;
  if (error != 0) error_ = error;  // a broken connection reports its error once, and then an orderly end
}

bool TcpStream::closed() {
  if (gone_) return true;
  if (may_have_data()) return false;
  char byte;
  const auto got = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !would_block(errno));
}

StreamState TcpStream::retire() {
  while (const std::size_t arrived = arrived_nbytes()) {
    make_room(arrived);
    const std::size_t got = receive(staging_.get() + end_, arrived);
    if (got == 0) break;
    end_ += got;
  }
  tls_.reset();
  if (socket_.valid()) former_ = std::move(socket_);
  gone_ = true;
  return {resumptions_, received_};
}

// Returns how many bytes can be received now, or more; 0 if there are none.
std::size_t TcpStream::arrived_nbytes() const {
  int arrived = 0;
  if (!socket_.valid() || ::ioctl(socket_.get(), FIONREAD, &arrived) != 0) return 0;
  return static_cast<std::size_t>(arrived) + (may_have_data() ? Tls::most_record_nbytes : 0);
}

void TcpStream::reject() {
  received_ -= end_ - begin_;
  begin_ = end_ = 0;
  disconnect();
  gone_ = true;
}

// Lets the stage take `nbytes` more bytes at its end.
void TcpStream::make_room(std::size_t nbytes) {
  if (capacity_ - end_ >= nbytes) return;
  const std::size_t staged_nbytes = end_ - begin_;
  const std::size_t capacity = std::max(capacity_, staged_nbytes + nbytes);
  auto larger = std::make_unique_for_overwrite<std::byte[]>(capacity);
  std::memcpy(larger.get(), staging_.get() + begin_, staged_nbytes);
  staging_ = std::move(larger);
  capacity_ = capacity;
  begin_ = 0;
  end_ = staged_nbytes;
}

bool TcpStream::resume(Connection connection, const StreamState& peer) {
  if (peer.received > sent_ || sent_ - peer.received > history_.size() + lasting_nbytes_) return false;
  prepare(std::move(connection));
  for (const std::span<const std::byte> piece : std::exchange(lasting_, {}))
    history_.append(piece.data(), piece.size());
  lasting_nbytes_ = 0;
  std::vector<std::byte> again = history_.take_last(static_cast<std::size_t>(sent_ - peer.received));
  again.insert(again.end(), waiting_.begin() + static_cast<std::ptrdiff_t>(waiting_sent_), waiting_.end());
  waiting_ = std::move(again);
  waiting_sent_ = 0;
  sent_ = peer.received;
  gone_ = false;
  error_ = 0;
  resumptions_ = peer.resumptions;
  return true;
}

}  // namespace unisono
