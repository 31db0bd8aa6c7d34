#include "shm/shm_channel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "kernels/kernels.h"
#include "system/cache_line.h"
#include "system/doorbell.h"
#include "system/fence.h"

namespace unisono {
namespace {

// Fields that different sides write are this far apart, because processors fetch cache lines in pairs.
constexpr std::size_t apart = 2 * cache_line;
constexpr std::size_t page = 4096;
constexpr std::size_t slots = 8;
constexpr std::size_t slot_capacity = 64 << 10;
constexpr std::size_t cell_capacity = 4 << 10;
// A job of two ranks has large byte rings. There, fragments of this length and more go through the byte ring. It is
// faster than cells, because the receiver's caches still hold the cells that the sender would write.
constexpr std::size_t least_in_large_ring = 2 << 10;
// Longer cells are not prefetched. From about the fifth line on the hardware prefetcher is as fast, and software
// prefetches would disturb it.
constexpr std::size_t most_fetched_nbytes = 1 << 10;
constexpr std::uint32_t looks_per_fetch = 4;
// The part of a ring in use: more between two ranks than among more, because a second-level cache holds the rings of
// few peers only.
constexpr std::size_t most_ring_nbytes = 1536 << 10;
constexpr std::size_t least_ring_nbytes = 640 << 10;
// The ring's pages are created this many bytes at a time.
constexpr std::size_t populated_at_once = 128 << 10;
static_assert(most_ring_nbytes % populated_at_once == 0 && populated_at_once % page == 0);
// A ring holds all fragments under way, each with up to a cache line in front for its alignment, plus one that does not
// fit at the end.
static_assert((slots + 1) * (slot_capacity + cache_line) <= least_ring_nbytes);
// The most bytes of a single-copy message that are copied at once: to the stage, and to any memory.
constexpr std::size_t stage_nbytes = 128 << 10;
constexpr std::size_t most_copied_nbytes = 1 << 20;
// The time to read 64 KiB of a result that is in a cache, and of one that is only in memory.
constexpr StorePolicy::ReadTimes result_ns{1600, 6500};
constexpr int required_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The process at the other end of a Unix socket; 0 if it is not visible from here.
pid_t process_of(int socket) {
  ucred peer{};
  socklen_t nbytes = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 ? peer.pid : 0;
}

}  // namespace

struct alignas(apart) ShmSlot {
  std::atomic<std::uint64_t> turn;  // the sender stores it after the label; the receiver awaits it
  SlotLabel label;
};
static_assert(sizeof(std::uint64_t) + sizeof(SlotLabel) == cache_line);
static_assert(sizeof(ArenaReference) == SlotLabel::small_capacity);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// One direction of a channel, in shared memory. All zeros is a valid initial state.
struct ShmDirection {
  alignas(apart) std::atomic<std::uint64_t> consumed;  // slots that the receiver has released; the sender reads it
  std::atomic<std::uint32_t> read_ns[store_ways];      // the receiver's time for 64 KiB, by the kind of store
  // the receiver's time for the last long message through slots: kept, combined
  std::atomic<std::uint32_t> slots_ns[2];
  std::atomic<std::uint32_t> single_copy_ns[2];  // and for the last one by single copy
  std::atomic<std::uint64_t> refused;       // number from 1 of the last slot whose message the receiver could not read
  std::atomic<std::uint64_t> refused_from;  // first byte of that message that it could not read
  // Each side sets its own flag before it sleeps, and the other side reads it after each change.
  alignas(apart) std::atomic<std::uint32_t> sender_waits;
  alignas(apart) std::atomic<std::uint32_t> receiver_waits;
  ShmSlot ring[slots];

  ShmSlot& slot(std::uint64_t index) { return ring[index % slots]; }
};

// Memory of a slot for a short fragment. Without the extra line, all cells would begin in the same lines of their pages
// and compete for the same few sets of a cache.
struct ShmCell {
  alignas(cache_line) std::byte data[cell_capacity];
  std::byte padding[cache_line];
};

// All cache lines that small messages touch are on one page.
struct ShmSegment {
  ShmDirection directions[2];
  alignas(page) ShmCell cells[2][slots];
  alignas(page) std::byte rings[2][most_ring_nbytes];
};
static_assert(sizeof(ShmSegment::directions) <= page);

std::size_t ShmChannel::segment_nbytes() { return sizeof(ShmSegment); }

ShmChannel::ShmChannel(std::int32_t peer, std::int32_t peers, bool dialler, Descriptor memory, Descriptor bell,
                       Descriptor peer_bell, Descriptor socket)
    : Channel(peer, "shm"),
      bell_(std::move(bell)),
      peer_bell_(std::move(peer_bell)),
      socket_(std::move(socket)),
      single_copy_policy_(dialler),
      only_peer_(peers == 1),
      least_in_ring_(only_peer_ ? least_in_large_ring : cell_capacity) {
  struct stat status{};
  const int seals = ::fcntl(memory.get(), F_GET_SEALS);
  if (::fstat(memory.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != segment_nbytes())
    throw ProtocolError("the shared memory of a channel has the wrong size");
  if (seals < 0 || (seals & required_seals) != required_seals)
    throw ProtocolError("the shared memory of a channel is not sealed");
  if (::fcntl(bell_.get(), F_SETFL, O_NONBLOCK) != 0 || ::fcntl(peer_bell_.get(), F_SETFL, O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "fcntl of a doorbell");
  void* mapped = ::mmap(nullptr, segment_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a channel");
  mapping_ = Mapping(mapped, segment_nbytes());
  auto* segment = static_cast<ShmSegment*>(mapped);
  const std::size_t out = dialler ? 0 : 1, in = 1 - out;
  out_ = &segment->directions[out];
  in_ = &segment->directions[in];
  out_cells_ = segment->cells[out];
  out_ring_ = segment->rings[out];
  in_cells_ = segment->cells[in];
  in_ring_ = segment->rings[in];
  peer_process_ = process_of(socket_.get());
  lighten_fences();
}

bool ShmChannel::open_slot() {
  if (slot_open_) return true;
  if (published_ - known_consumed_ == slots) known_consumed_ = out_->consumed.load(std::memory_order_acquire);
  // A peer with an impossible count gets no credit.
  if (published_ - known_consumed_ >= slots) return false;
  slot_open_ = true;
  slot_filled_ = 0;
  stored_ = {};
  return true;
}

// Notes how many of this rank's slots the peer has read, by a count that came with a message. This saves a look at the
// peer's counter, which costs a cache line. A count above the number of published slots is wrong and ignored.
void ShmChannel::note_consumed(std::uint32_t acknowledged) {
  const std::uint32_t newly = acknowledged - static_cast<std::uint32_t>(known_consumed_);
  if (newly <= published_ - known_consumed_) known_consumed_ += newly;
}

bool ShmChannel::begin(const Header& header, Whole whole, MemoryType /*memory*/) {
  if (!open_slot()) return false;
  label_.header = header;
  out_remaining_ = header.nbytes;
  counters_->sent_messages += 1;
  counters_->sent_nbytes += header.nbytes;
  by_reference_ = whole.data != nullptr && (send_reference(header, whole.data) || send_single_copy(header, whole));
  if (out_remaining_ == 0 || by_reference_) publish_slot();
  return true;
}

bool ShmChannel::send_reference(const Header& header, const std::byte* whole) {
  if (header.nbytes < least_whole_nbytes) return false;
  const auto reference = refer(whole, header.nbytes);
  if (!reference) return false;
  label_.nbytes = SlotLabel::reference;
  std::memcpy(label_.small, &*reference, sizeof *reference);
  return true;
}

bool ShmChannel::send_single_copy(const Header& header, Whole whole) {
  if (!single_copy_allowed_ || !SingleCopyPolicy::is_eligible(header.nbytes, whole.incoming)) return false;
  SingleCopyPolicy::Costs costs{};
  for (std::size_t use = 0; use < costs.size(); ++use) {
    const std::uint32_t read_ns = out_->slots_ns[use].load(std::memory_order_relaxed);
    const std::uint32_t slots_ns = only_peer_ ? read_ns + ahead_ns_ : stores_.usual_cost(read_times());
    costs[use] = {read_ns == 0 ? 0 : slots_ns, out_->single_copy_ns[use].load(std::memory_order_relaxed)};
  }
  measured_ = !single_copy_policy_.use_single_copy(header.nbytes, whole.incoming == Incoming::combined, costs,
                                                   stores_.ordinary_ns());
  if (measured_) {
    writing_ = {};
    begun_at_ = published_;
    return false;
  }
  single_copy_data_ = whole.data;
  const auto address = reinterpret_cast<std::uint64_t>(single_copy_data_);
  label_.nbytes = SlotLabel::single_copy;
  std::memcpy(label_.small, &address, sizeof address);
  return true;
}

StorePolicy::ReadTimes ShmChannel::read_times() const {
  StorePolicy::ReadTimes times{};
  for (std::size_t way = 0; way < times.size(); ++way) times[way] = out_->read_ns[way].load(std::memory_order_relaxed);
  return times;
}

// In the ring, a fragment has the offset in its cache line that it has in the user's memory, and mostly in the peer's
// too. So both copies move whole lines and avoid the slow case of `copy_array`.
std::byte* ShmChannel::place_fragment(const std::byte* data, std::size_t nbytes) {
  if (label_.header.nbytes <= SlotLabel::small_capacity) return label_.small;
  if (!goes_into_ring(nbytes)) return out_cells_[published_ % slots].data;
  const std::size_t used = only_peer_ ? most_ring_nbytes : least_ring_nbytes;
  const std::size_t lead = reinterpret_cast<std::uintptr_t>(data) % cache_line;
  if (ring_next_ + lead + nbytes > used) ring_next_ = 0;
  const std::size_t end = ring_next_ + lead + nbytes;
  if (end > ring_populated_) populate_ring(end);
  const auto place = static_cast<std::uint32_t>(ring_next_ + lead);
  std::memcpy(label_.small, &place, sizeof place);
  ring_next_ = static_cast<std::uint32_t>((end + cache_line - 1) / cache_line * cache_line);
  return out_ring_ + place;
}

// Creates many pages of the ring at once, because touching them one by one takes several times as long on either side.
// A kernel without this feature creates them when they are touched.
void ShmChannel::populate_ring(std::size_t nbytes) {
  const std::size_t until = (nbytes + populated_at_once - 1) / populated_at_once * populated_at_once;
#ifdef MADV_POPULATE_WRITE
  ::madvise(out_ring_ + ring_populated_, until - ring_populated_, MADV_POPULATE_WRITE);
#endif
  ring_populated_ = until;
}

std::size_t ShmChannel::write(const std::byte* data, std::size_t nbytes) {
  if (by_reference_) return nbytes;
  std::size_t taken = 0;
  while (taken < nbytes && open_slot()) {
    if (slot_filled_ == 0) fragment_ = place_fragment(data + taken, std::min(out_remaining_, slot_capacity));
    const std::size_t part = std::min(nbytes - taken, slot_capacity - slot_filled_);
    stored_ = stores_.choose(part, [this] { return read_times(); });
    stored_.timed |= measured_;
    writing_ += stores_.fill(fragment_ + slot_filled_, data + taken, part, stored_);
    slot_filled_ += part;
    taken += part;
    out_remaining_ -= part;
    if (slot_filled_ == slot_capacity || out_remaining_ == 0) publish_slot();
  }
  return taken;
}

bool ShmChannel::flush() {
  if (by_reference_) {
    known_consumed_ = out_->consumed.load(std::memory_order_acquire);
    if (known_consumed_ != published_) return false;
    by_reference_ = false;
    note_refusal();
  }
  return single_copy_data_ == nullptr || write_refused();
}

// Looks whether the peer could read a single-copy message, which it has finished. If not, the rest will go through
// slots.
void ShmChannel::note_refusal() {
  if (single_copy_data_ == nullptr) return;
  if (out_->refused.load(std::memory_order_relaxed) != published_) {
    single_copy_data_ = nullptr;
    return;
  }
  const std::uint64_t from = out_->refused_from.load(std::memory_order_relaxed);
  if (from >= out_remaining_) throw ProtocolError("a peer refused a message from a byte behind its end on");
  single_copy_allowed_ = false;
  single_copy_data_ += from;
  out_remaining_ -= from;
}

bool ShmChannel::write_refused() {
  single_copy_data_ += write(single_copy_data_, out_remaining_);
  if (out_remaining_ != 0) return false;
  single_copy_data_ = nullptr;
  return true;
}

void ShmChannel::publish_slot() {
  if (!by_reference_)
    label_.nbytes = static_cast<std::uint32_t>(slot_filled_) | (goes_into_ring(slot_filled_) ? SlotLabel::in_ring : 0) |
                    (stored_.stores == Stores::streaming ? SlotLabel::streamed : 0) |
                    (stored_.timed ? SlotLabel::timed : 0);
  label_.acknowledged = static_cast<std::uint32_t>(released_);
  // The label is stored in one piece, because the receiver polls this cache line and would take it away between two
  // stores.
  ShmSlot& slot = out_->slot(published_);
  slot.label = label_;
  ++published_;
  slot.turn.store(published_, std::memory_order_release);
  slot_open_ = false;
  wake_peer_if(out_->receiver_waits);
  if (measured_ && (published_ - begun_at_ == slots || out_remaining_ == 0)) {
    ahead_ns_ = RecentTimes::of(writing_, label_.header.nbytes);
    measured_ = false;
  }
}

void ShmChannel::wake_peer_if(const std::atomic<std::uint32_t>& waits) const {
  light_fence();
  if (waits.load(std::memory_order_relaxed) != 0) Doorbell::ring(peer_bell_.get());
}

const Header* ShmChannel::front() {
  if (message_open_) return &in_header_;
  const ShmSlot& slot = in_->slot(released_);
  fetch_cell();
  if (slot.turn.load(std::memory_order_acquire) != released_ + 1) return nullptr;
  in_header_ = slot.label.header;
  in_remaining_ = in_header_.nbytes;
  message_open_ = true;
  if (in_remaining_ >= SingleCopyPolicy::least_nbytes) {
    combined_ = true;
    message_began_ = Clock::now();
  }
  counters_->received_messages += 1;
  counters_->received_nbytes += in_remaining_;
  return take_slot() ? &in_header_ : nullptr;
}

// Prefetches the lines of a cell together with the slot that announces it, as many as the last cell had. It does not do
// so at every look for a message, because prefetching would take the lines from the peer while the peer fills them.
void ShmChannel::fetch_cell() {
  if (cell_fetched_ == 0 || ++looks_ % looks_per_fetch != 0) return;
  const std::byte* cell = in_cells_[released_ % slots].data;
  for (std::size_t line = 0; line < cell_fetched_; line += cache_line) __builtin_prefetch(cell + line);
}

bool ShmChannel::take_slot() {
  if (slot_taken_) return true;
  const ShmSlot& slot = in_->slot(released_);
  if (slot.turn.load(std::memory_order_acquire) != released_ + 1) return false;
  const SlotLabel label = slot.label;
  note_consumed(label.acknowledged);
  const bool begins = in_remaining_ == in_header_.nbytes;
  if (label.nbytes == SlotLabel::reference && begins)
    take_reference(label);
  else if (label.nbytes == SlotLabel::single_copy && begins)
    take_single_copy(label);
  else
    take_fragment(slot, label);
  slot_used_ = 0;
  slot_taken_ = true;
  return true;
}

void ShmChannel::take_fragment(const ShmSlot& slot, const SlotLabel& label) {
  slot_nbytes_ = label.nbytes & ~SlotLabel::flags;
  if ((label.nbytes & SlotLabel::timed) != 0 && slot_nbytes_ != 0) {
    slot_stored_ = (label.nbytes & SlotLabel::streamed) != 0 ? Stores::streaming : Stores::ordinary;
    slot_taken_at_ = Clock::now();
  }
  if (slot_nbytes_ > slot_capacity || slot_nbytes_ > in_remaining_ || (slot_nbytes_ == 0 && in_remaining_ != 0))
    throw ProtocolError("a fragment in shared memory has an impossible length");
  if (in_header_.nbytes <= SlotLabel::small_capacity) {
    slot_data_ = slot.label.small;
  } else if ((label.nbytes & SlotLabel::in_ring) != 0) {
    slot_data_ = in_ring_ + place_in_ring(label);
  } else {
    if (slot_nbytes_ > cell_capacity) throw ProtocolError("a fragment in shared memory does not fit into its cell");
    slot_data_ = in_cells_[released_ % slots].data;
    cell_fetched_ = slot_nbytes_ <= most_fetched_nbytes ? slot_nbytes_ : 0;
  }
}

std::size_t ShmChannel::place_in_ring(const SlotLabel& label) const {
  std::uint32_t place;
  std::memcpy(&place, label.small, sizeof place);
  if (place > most_ring_nbytes - slot_nbytes_)
    throw ProtocolError("a fragment in shared memory lies outside of its ring");
  return place;
}

void ShmChannel::take_reference(const SlotLabel& label) {
  ArenaReference reference;
  std::memcpy(&reference, label.small, sizeof reference);
  slot_data_ = resolve(reference, in_remaining_);
  slot_is_reference_ = true;
  slot_nbytes_ = in_remaining_;
}

void ShmChannel::take_single_copy(const SlotLabel& label) {
  if (in_remaining_ == 0) throw ProtocolError("a message without a payload was sent as a single copy");
  std::uint64_t address;
  std::memcpy(&address, label.small, sizeof address);
  peer_address_ = address;
  slot_nbytes_ = in_remaining_;
  copied_to_ = 0;
  copying_ = {};
}

std::span<const std::byte> ShmChannel::readable() {
  if (!has_slot()) return {};
  return peer_address_ ? staged() : std::span(slot_data_ + slot_used_, slot_nbytes_ - slot_used_);
}

// The rest of the last piece comes first. A piece in the stage has the offset in its cache line that it has in the
// peer, so that the kernel copies it fast.
std::span<const std::byte> ShmChannel::staged() {
  stage_.resize(stage_nbytes + cache_line);
  const auto place = [this](std::size_t from) {
    return stage_.data() + line_offset(*peer_address_ + from, stage_.data());
  };
  if (awaits_copy() && !copy_from_peer(place(slot_used_), std::min(stage_nbytes, slot_nbytes_ - slot_used_))) return {};
  return {place(copied_from_) + (slot_used_ - copied_from_), copied_to_ - slot_used_};
}

bool ShmChannel::copy_from_peer(std::byte* data, std::size_t nbytes) {
  copy_began_ = Clock::now();
  const iovec here{data, nbytes};
  const iovec there{reinterpret_cast<void*>(*peer_address_ + slot_used_), nbytes};
  if (::process_vm_readv(peer_process_, &here, 1, &there, 1, 0) != static_cast<ssize_t>(nbytes)) {
    refuse();
    return false;
  }
  copied_from_ = slot_used_;
  copied_to_ = slot_used_ + nbytes;
  return true;
}

// Releases the slot; the rest of the message will come through slots.
void ShmChannel::refuse() {
  in_->refused_from.store(slot_used_, std::memory_order_relaxed);
  in_->refused.store(released_ + 1, std::memory_order_relaxed);
  release_slot();
}

std::size_t ShmChannel::read(std::byte* data, std::size_t nbytes, MemoryType memory) {
  combined_ = false;
  if (!has_slot()) return 0;
  if (slot_is_reference_) return read_by([this](auto... part) { results_.copy(part..., result_ns); }, data, nbytes);
  if (!awaits_copy() || is_slow_for_rep_movsb(data, *peer_address_ + slot_used_))
    return Channel::read(data, nbytes, memory);
  const std::size_t part = std::min({nbytes, slot_nbytes_ - slot_used_, most_copied_nbytes});
  if (!copy_from_peer(data, part)) return 0;
  consume(part);
  return part;
}

// Whether bytes of the open message have arrived and can be read.
bool ShmChannel::has_slot() { return message_open_ && take_slot(); }

// Whether the next bytes of a single-copy message have not been copied from the peer yet.
bool ShmChannel::awaits_copy() const { return peer_address_ && slot_used_ == copied_to_; }

void ShmChannel::consume(std::size_t nbytes) {
  slot_used_ += nbytes;
  in_remaining_ -= nbytes;
  if (peer_address_ && slot_used_ == copied_to_) copying_ += Clock::now() - copy_began_;
  if (slot_used_ < slot_nbytes_) return;
  if (slot_taken_at_) note_read();
  if (in_remaining_ == 0) end_message();
  release_slot();
}

void ShmChannel::release_slot() {
  slot_taken_ = false;
  slot_is_reference_ = false;
  peer_address_.reset();
  ++released_;
  in_->consumed.store(released_, std::memory_order_release);
  wake_peer_if(in_->sender_waits);
}

std::size_t ShmChannel::read_past_caches(std::byte* data, std::size_t nbytes) {
  if (has_slot() && awaits_copy()) return read(data, nbytes);
  combined_ = false;
  return read_by([this](auto... part) { copies_.copy(part...); }, data, nbytes);
}

// Reports to the sender how long the read of a slot took.
void ShmChannel::note_read() {
  const auto way = static_cast<std::size_t>(slot_stored_);
  read_[way].add(RecentTimes::of(Clock::now() - *std::exchange(slot_taken_at_, std::nullopt), slot_nbytes_));
  in_->read_ns[way].store(read_[way].smallest(), std::memory_order_relaxed);
}

// Reports to the sender how long a long message took to read. If the message came through slots, this time includes the
// time in which this rank sent data.
void ShmChannel::end_message() {
  message_open_ = false;
  if (in_header_.nbytes < SingleCopyPolicy::least_nbytes) return;
  single_copy_policy_.note_peer_choice(in_header_.nbytes, combined_, peer_address_.has_value());
  const Clock::duration took = peer_address_ ? copying_ : Clock::now() - message_began_;
  auto& took_ns = peer_address_ ? in_->single_copy_ns : in_->slots_ns;
  took_ns[combined_].store(RecentTimes::of(took, in_header_.nbytes), std::memory_order_relaxed);
}

bool ShmChannel::may_progress(bool for_send, bool for_receive) const {
  if (for_send && out_->consumed.load(std::memory_order_relaxed) != known_consumed_) return true;
  return for_receive && in_->slot(released_).turn.load(std::memory_order_relaxed) == released_ + 1;
}

// Returns whether the peer has closed its end of the socket. Unread bytes in the socket do not matter.
bool ShmChannel::closed() {
  pollfd socket{socket_.get(), POLLRDHUP, 0};
  return ::poll(&socket, 1, 0) > 0;
}

void ShmChannel::prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) {
  if (for_send) out_->sender_waits.store(1, std::memory_order_relaxed);
  if (for_receive) in_->receiver_waits.store(1, std::memory_order_relaxed);
  descriptors.push_back({socket_.get(), POLLRDHUP, 0});
  descriptors.push_back({bell_.get(), POLLIN, 0});
}

void ShmChannel::cancel_sleep() {
  out_->sender_waits.store(0, std::memory_order_relaxed);
  in_->receiver_waits.store(0, std::memory_order_relaxed);
  Doorbell::drain(bell_.get());
}

}  // namespace unisono
