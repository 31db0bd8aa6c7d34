#include "shm_channel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "doorbell.h"

namespace unisono {
namespace {

constexpr std::size_t cache_line = 64;
constexpr std::size_t slots = 8;
constexpr std::size_t slot_capacity = 64 << 10;
constexpr std::size_t inline_nbytes = 16;
constexpr int required_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct alignas(cache_line) Slot {
  std::atomic<std::uint64_t> turn;
  Header header;         // in the first slot of a message
  std::uint32_t nbytes;  // of the fragment in this slot
  std::uint32_t padding;
  std::byte small[inline_nbytes];  // a payload that fits here lies here
  std::byte data[slot_capacity];
};
static_assert(offsetof(Slot, data) == cache_line);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace

// One direction of a channel, in shared memory. All zeros is its valid initial state.
struct ShmDirection {
  alignas(cache_line) std::atomic<std::uint64_t> consumed;
  alignas(cache_line) std::atomic<std::uint32_t> sender_waits;
  alignas(cache_line) std::atomic<std::uint32_t> receiver_waits;
  Slot ring[slots];

  Slot& slot(std::uint64_t index) { return ring[index % slots]; }
};

std::size_t ShmChannel::segment_nbytes() { return 2 * sizeof(ShmDirection); }

ShmChannel::ShmChannel(std::int32_t peer, bool dialler, Descriptor memory, Descriptor bell, Descriptor peer_bell,
                       Descriptor socket)
    : Channel(peer, "shm"), bell_(std::move(bell)), peer_bell_(std::move(peer_bell)), socket_(std::move(socket)) {
  struct stat status{};
  const int seals = ::fcntl(memory.get(), F_GET_SEALS);
  if (::fstat(memory.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != segment_nbytes())
    throw ProtocolError("the shared memory of a channel has the wrong size");
  if (seals < 0 || (seals & required_seals) != required_seals)
    throw ProtocolError("the shared memory of a channel is not sealed");
  if (::fcntl(bell_.get(), F_SETFL, O_NONBLOCK) != 0 || ::fcntl(peer_bell_.get(), F_SETFL, O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl of a doorbell");
  mapping_ = ::mmap(nullptr, segment_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a channel");
  auto* directions = static_cast<ShmDirection*>(mapping_);
  out_ = &directions[dialler ? 0 : 1];
  in_ = &directions[dialler ? 1 : 0];
}

ShmChannel::~ShmChannel() { ::munmap(mapping_, segment_nbytes()); }

bool ShmChannel::open_slot() {
  if (slot_open_) return true;
  if (published_ - known_consumed_ == slots) known_consumed_ = out_->consumed.load(std::memory_order_acquire);
  // A peer that counts nonsense gets no credit.
  if (published_ - known_consumed_ >= slots) return false;
  slot_open_ = true;
  slot_filled_ = 0;
  return true;
}

bool ShmChannel::begin(const Header& header) {
  if (!open_slot()) return false;
  out_->slot(published_).header = header;
  out_left_ = out_nbytes_ = header.nbytes;
  ++counters_.sent_messages;
  counters_.sent_nbytes += header.nbytes;
  if (out_left_ == 0) publish_slot();
  return true;
}

std::size_t ShmChannel::write(const std::byte* data, std::size_t nbytes) {
  std::size_t taken = 0;
  while (taken < nbytes && open_slot()) {
    Slot& slot = out_->slot(published_);
    std::byte* room = out_nbytes_ <= inline_nbytes ? slot.small : slot.data;
    const std::size_t part = std::min(nbytes - taken, slot_capacity - slot_filled_);
    std::memcpy(room + slot_filled_, data + taken, part);
    slot_filled_ += part;
    taken += part;
    out_left_ -= part;
    if (slot_filled_ == slot_capacity || out_left_ == 0) publish_slot();
  }
  return taken;
}

void ShmChannel::publish_slot() {
  Slot& slot = out_->slot(published_);
  slot.nbytes = static_cast<std::uint32_t>(slot_filled_);
  ++published_;
  slot.turn.store(published_, std::memory_order_release);
  slot_open_ = false;
  wake_peer_if(out_->receiver_waits);
}

void ShmChannel::wake_peer_if(const std::atomic<std::uint32_t>& waits) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (waits.load(std::memory_order_relaxed) != 0) Doorbell::ring(peer_bell_.get());
}

const Header* ShmChannel::front() {
  if (message_open_) return &in_header_;
  const Slot& slot = in_->slot(released_);
  if (slot.turn.load(std::memory_order_acquire) != released_ + 1) return nullptr;
  in_header_ = slot.header;
  in_left_ = in_header_.nbytes;
  message_open_ = true;
  ++counters_.received_messages;
  counters_.received_nbytes += in_left_;
  return take_slot() ? &in_header_ : nullptr;
}

bool ShmChannel::take_slot() {
  if (slot_taken_) return true;
  const Slot& slot = in_->slot(released_);
  if (slot.turn.load(std::memory_order_acquire) != released_ + 1) return false;
  slot_nbytes_ = slot.nbytes;
  if (slot_nbytes_ > slot_capacity || slot_nbytes_ > in_left_ || (slot_nbytes_ == 0 && in_left_ != 0))
    throw ProtocolError("a fragment in shared memory has an impossible length");
  slot_data_ = in_header_.nbytes <= inline_nbytes ? slot.small : slot.data;
  slot_used_ = 0;
  slot_taken_ = true;
  return true;
}

std::span<const std::byte> ShmChannel::readable() {
  if (!message_open_ || !take_slot()) return {};
  return {slot_data_ + slot_used_, slot_nbytes_ - slot_used_};
}

void ShmChannel::consume(std::size_t nbytes) {
  slot_used_ += nbytes;
  in_left_ -= nbytes;
  if (slot_used_ < slot_nbytes_) return;
  slot_taken_ = false;
  if (in_left_ == 0) message_open_ = false;
  ++released_;
  in_->consumed.store(released_, std::memory_order_release);
  wake_peer_if(in_->sender_waits);
}

bool ShmChannel::closed() {
  char byte;
  const auto got = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void ShmChannel::prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) {
  if (for_send) out_->sender_waits.store(1, std::memory_order_relaxed);
  if (for_receive) in_->receiver_waits.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  descriptors.push_back({socket_.get(), POLLRDHUP, 0});
  descriptors.push_back({bell_.get(), POLLIN, 0});
}

void ShmChannel::cancel_sleep() {
  out_->sender_waits.store(0, std::memory_order_relaxed);
  in_->receiver_waits.store(0, std::memory_order_relaxed);
  Doorbell::drain(bell_.get());
}

}  // namespace unisono
