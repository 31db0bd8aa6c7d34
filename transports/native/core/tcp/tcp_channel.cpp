#include "tcp/tcp_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/kernels.h"
#include "tcp/crc32c.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t largest_block_nbytes = 256 << 10;
// The size of a block if a channel has several streams. The kernel buffers this much of a new connection. A longer
// block would have to wait for acknowledgements of its start, while the other streams wait for their turn.
constexpr std::size_t shared_block_nbytes = 64 << 10;
// Space for a block with its checksum, and for a little of the data after it.
constexpr std::size_t most_read_ahead_nbytes = largest_block_nbytes + 4096;
// The payload of a message up to this length is gathered, so it is sent in one call even if it lies in many places.
constexpr std::size_t most_gathered_nbytes = 4096;
// A plain receive of at least this many bytes goes from the kernel directly into its destination.
constexpr std::size_t direct_read_nbytes = 16 << 10;

// The bytes that a sender keeps if blocks have checksums. A block that arrives damaged must be sent again, although the
// peer's kernel has acknowledged it. The damaged block lies among the bytes that this kernel buffers, which are 6 MiB
// by default on Linux.
constexpr std::size_t kept_checked_nbytes = 8 << 20;

}  // namespace

TcpChannel::TcpChannel(std::int32_t peer, std::vector<Connection> connections, const TcpTerms& terms)
    : Channel(peer, "tcp"), terms_(terms), header_read_ahead_(most_read_ahead_nbytes) {
  if (connections.empty() || connections.size() > TcpTerms::most_streams)
    throw std::invalid_argument("a TCP channel needs 1 to " + std::to_string(TcpTerms::most_streams) + " connections");
  block_nbytes_ = connections.size() == 1 ? largest_block_nbytes : shared_block_nbytes;
  const std::size_t kept_nbytes = terms.checksum ? kept_checked_nbytes : 0;
  for (Connection& connection : connections)
    streams_.emplace_back(std::move(connection), most_read_ahead_nbytes, kept_nbytes);
  out_stream_ = streams_.data();
}

std::size_t TcpChannel::block_remaining(std::uint64_t position, std::uint64_t nbytes) const {
  return static_cast<std::size_t>(std::min<std::uint64_t>(block_nbytes_ - position % block_nbytes_, nbytes - position));
}

TcpStream& TcpChannel::stream_of(std::uint64_t position) {
  return streams_[static_cast<std::size_t>(position / block_nbytes_ % streams_.size())];
}

bool TcpChannel::begin(const Header& header, Whole whole, MemoryType /*memory*/) {
  WireHeader wire{};
  wire.magic = WireHeader::right_magic;
  wire.header = header;
  wire.epoch = terms_.epoch;
  wire.number = out_number_++;
  wire.flags = terms_.checksum ? WireHeader::checked : 0;
  wire.checksum = wire.right_checksum();
  out_stream_ = streams_.data();
  out_stream_->append(&wire, sizeof wire);
  out_nbytes_ = header.nbytes;
  out_done_ = 0;
  out_lasts_ = whole.data != nullptr && !terms_.checksum;
  counters_->sent_messages += 1;
  counters_->sent_nbytes += header.nbytes;
  return true;
}

// Returns the stream of the next block; nullptr as long as another stream has unsent bytes of the block before.
TcpStream* TcpChannel::next_stream() {
  TcpStream* stream = &stream_of(out_done_);
  if (stream != out_stream_ && !out_stream_->flush()) return nullptr;
  return out_stream_ = stream;
}

std::size_t TcpChannel::write(const std::byte* data, std::size_t nbytes) {
  TcpStream* stream = next_stream();
  if (stream == nullptr || nbytes == 0) return 0;
  std::size_t taken = std::min(nbytes, block_remaining(out_done_, out_nbytes_));
  if (out_nbytes_ <= most_gathered_nbytes) {
    stream->append(data, taken);
  } else {
    taken = stream->send(data, taken, out_lasts_);
  }
  if (terms_.checksum) out_checksum_ = crc32c(out_checksum_, data, taken);
  out_done_ += taken;
  if (taken != 0 && (out_done_ == out_nbytes_ || out_done_ % block_nbytes_ == 0)) end_block();
  return taken;
}

bool TcpChannel::flush() {
  bool all = out_stream_->flush();
  if (was_resumed_) {
    for (TcpStream& stream : streams_) all &= stream.flush();
    was_resumed_ = !all;
  }
  if (all && std::exchange(out_lasts_, false))
    for (TcpStream& stream : streams_) stream.keep_lasting();
  return all;
}

void TcpChannel::end_block() {
  if (!terms_.checksum) return;
  out_stream_->append(&out_checksum_, sizeof out_checksum_);
  out_checksum_ = 0;
}

const Header* TcpChannel::front() {
  if (message_open_) return &in_header_;
  TcpStream& stream = streams_.front();
  if (stream.staged().size() < sizeof(WireHeader)) stream.read_ahead(sizeof(WireHeader), header_read_ahead_);
  if (stream.staged().size() < sizeof(WireHeader)) return nullptr;
  WireHeader wire;
  std::memcpy(&wire, stream.staged().data(), sizeof wire);
  if (wire.magic != WireHeader::right_magic || wire.checksum != wire.right_checksum()) {
    demand_again(stream, "with a damaged header");
    return nullptr;
  }
  damaged_ = 0;
  check(wire);
  stream.take(sizeof wire);
  in_header_ = wire.header;
  in_checked_ = (wire.flags & WireHeader::checked) != 0;
  in_done_ = 0;
  receiving_.begin_message(in_header_.nbytes);
  ++in_number_;
  // The next message is probably of a similar length. After a short message, the next header is read together with the
  // bytes behind it. After a long message, it is read alone, because the data behind it is read directly into the
  // buffer of the caller.
  header_read_ahead_ = in_header_.nbytes < direct_read_nbytes ? most_read_ahead_nbytes : sizeof wire;
  message_open_ = true;
  counters_->received_messages += 1;
  counters_->received_nbytes += in_header_.nbytes;
  return &in_header_;
}

void TcpChannel::check(const WireHeader& wire) const {
  if (wire.epoch != terms_.epoch) throw ProtocolError(arrived("of another epoch"));
  if (wire.number != in_number_) throw ProtocolError(arrived("out of its turn"));
}

std::string TcpChannel::arrived(const char* how) const {
  return "a message over TCP from rank " + std::to_string(peer()) + " arrived " + how;
}

std::span<const std::byte> TcpChannel::readable() {
  if (!message_open_ || in_done_ == in_header_.nbytes) return {};
  TcpStream& stream = stream_of(in_done_);
  const std::size_t remaining = block_remaining(in_done_, in_header_.nbytes);
  if (in_checked_) return verify(stream, remaining) ? stream.staged().first(remaining) : std::span<const std::byte>();
  if (stream.staged().empty()) stage(stream);
  return stream.staged().first(std::min(stream.staged().size(), remaining));
}

void TcpChannel::stage(TcpStream& stream) {
  const auto began = Clock::now();
  stream.read_ahead(1, most_read_ahead_nbytes, staging_.line_offset());
  staging_.note(Clock::now() - began, stream.staged().size());
}

// Asks the peer to send data again that has arrived damaged. Throws Corruption if the peer does not keep it, or if it
// has arrived damaged before.
void TcpChannel::demand_again(TcpStream& stream, const char* how) {
  if (!terms_.checksum || damaged_++ != 0) throw Corruption(arrived(how), peer());
  stream.reject();
}

// Whether the front block of `nbytes` has arrived undamaged.
bool TcpChannel::verify(TcpStream& stream, std::size_t nbytes) {
  if (block_verified_) return true;
  BlockChecksum expected;
  const std::size_t needed = nbytes + sizeof expected;
  if (stream.staged().size() < needed) stream.read_ahead(needed, most_read_ahead_nbytes);
  if (stream.staged().size() < needed) return false;
  std::memcpy(&expected, stream.staged().data() + nbytes, sizeof expected);
  if (crc32c(0, stream.staged().data(), nbytes) != expected) {
    demand_again(stream, "with a damaged payload");
    return false;
  }
  damaged_ = 0;
  return block_verified_ = true;
}

void TcpChannel::consume(std::size_t nbytes) {
  TcpStream& stream = stream_of(in_done_);
  stream.take(nbytes);
  advance_position(stream, nbytes);
}

void TcpChannel::advance_position(TcpStream& stream, std::size_t nbytes) {
  in_done_ += nbytes;
  const bool ends_message = in_done_ == in_header_.nbytes;
  if (block_verified_ && nbytes != 0 && (ends_message || in_done_ % block_nbytes_ == 0)) {
    stream.take(sizeof(BlockChecksum));
    block_verified_ = false;
  }
  if (ends_message) message_open_ = false;
}

std::size_t TcpChannel::read(std::byte* data, std::size_t nbytes, MemoryType /*memory*/) {
  TcpStream& stream = stream_of(in_done_);
  const bool ends_message = nbytes == in_header_.nbytes - in_done_ && in_header_.nbytes >= direct_read_nbytes;
  const bool direct = nbytes >= direct_read_nbytes || ends_message;
  if (in_checked_ || !direct || !stream.staged().empty()) return Channel::read(data, nbytes);
  return receive(stream, data, receiving_.most(std::min(nbytes, block_remaining(in_done_, in_header_.nbytes))));
}

// Moves up to `nbytes` from the kernel to `data`, directly or through the stage.
std::size_t TcpChannel::receive(TcpStream& stream, std::byte* data, std::size_t nbytes) {
  const auto began = Clock::now();
  const bool is_staged = receiving_.is_staged();
  std::size_t got;
  if (is_staged) {
    stream.read_ahead(1, nbytes, (stream.line_offset(data) + half_cache_line) % cache_line);
    got = stream.staged().size();
    copy_array(data, stream.staged().data(), got);
    stream.take(got);
  } else {
    got = stream.receive(data, nbytes);
  }
  receiving_.note(is_staged, Clock::now() - began, got);
  advance_position(stream, got);
  return got;
}

bool TcpChannel::closed() {
  return std::any_of(streams_.begin(), streams_.end(), [](TcpStream& stream) { return stream.closed(); });
}

std::vector<BrokenStream> TcpChannel::broken() {
  std::vector<BrokenStream> broken;
  for (std::uint32_t i = 0; i < streams_.size(); ++i)
    if (streams_[i].closed()) broken.push_back({i, streams_[i].resumptions()});
  return broken;
}

std::vector<BrokenStream> TcpChannel::silent(Clock::time_point now, Clock::duration limit) {
  std::vector<BrokenStream> silent;
  for (std::uint32_t i = 0; i < streams_.size(); ++i) {
    streams_[i].look(now);
    if (streams_[i].silence().stuck(now) >= limit) silent.push_back({i, streams_[i].resumptions()});
  }
  return silent;
}

std::optional<StreamState> TcpChannel::retire(const BrokenStream& stream) {
  if (stream.stream >= streams_.size() || streams_[stream.stream].resumptions() > stream.resumptions) return {};
  return streams_[stream.stream].retire();
}

bool TcpChannel::resume(std::uint32_t stream, Connection connection, const StreamState& peer) {
  if (stream >= streams_.size() || !streams_[stream].resume(std::move(connection), peer)) return false;
  return was_resumed_ = true;
}

void TcpChannel::prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) {
  const TcpStream* sends = for_send ? out_stream_ : nullptr;
  awaited_ = !for_receive ? nullptr : message_open_ ? &stream_of(in_done_) : streams_.data();
  for (const TcpStream& stream : streams_) {
    const int events = (&stream == sends ? POLLOUT : 0) | (&stream == awaited_ ? POLLIN : 0) | POLLRDHUP;
    descriptors.push_back({stream.get(), static_cast<short>(events), 0});
  }
}

std::chrono::microseconds TcpChannel::max_sleep() const {
  const bool has_data = awaited_ != nullptr && awaited_->may_have_data();
  return has_data ? std::chrono::microseconds::zero() : std::chrono::microseconds::max();
}

}  // namespace unisono
