#include "shm/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "system/reserved_pages.h"

namespace unisono {
namespace {

constexpr std::size_t large_page_nbytes = 2 << 20;
constexpr std::size_t first_capacity = 64;

[[noreturn]] void fail(const char* what) {
  if (errno == ENOMEM) throw std::bad_alloc();
  throw std::system_error(errno, std::generic_category(), what);
}

// The system provides memory when it is touched. A size that no machine could provide is refused now, as malloc would.
void check_available(std::size_t nbytes) {
  void* trial = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (trial == MAP_FAILED) fail("mmap");
  ::munmap(trial, nbytes);
}

Descriptor make_memory(std::size_t nbytes) {
  Descriptor memory(::memfd_create("unisono-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) fail("memfd_create");
  if (::ftruncate(memory.get(), static_cast<off_t>(nbytes)) != 0) fail("ftruncate");
  if (!reserve_pages(memory.get(), nbytes)) fail("fallocate");
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");
  return memory;
}

}  // namespace

std::byte* map_memory(int memory, std::size_t nbytes, int protection) {
  const std::size_t slack = nbytes < large_page_nbytes ? 0 : large_page_nbytes;
  void* room = ::mmap(nullptr, nbytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail("mmap");
  auto* begin = static_cast<std::byte*>(room);
  const std::size_t lead = slack == 0 ? 0 : -reinterpret_cast<std::uintptr_t>(room) % large_page_nbytes;
  std::byte* place = begin + lead;
  if (::mmap(place, nbytes, protection, MAP_SHARED | MAP_FIXED, memory, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(room, nbytes + slack);
    errno = error;
    fail("mmap");
  }
  if (lead != 0) ::munmap(begin, lead);
  if (slack != lead) ::munmap(place + nbytes, slack - lead);
  if (slack != 0) ::madvise(place, nbytes, MADV_HUGEPAGE);
  return place;
}

class ArenaRegistry {
 public:
  // Never destroyed, because arrays may outlive static objects.
  static ArenaRegistry& instance() {
    static ArenaRegistry* const registry = new ArenaRegistry;
    return *registry;
  }

  void add(Arena& arena) {
    const std::lock_guard lock(mutex_);
    arena.id_ = ++last_id_;
    by_address_[reinterpret_cast<std::uintptr_t>(arena.data_)] = &arena;
    by_id_[arena.id_] = &arena;
    rewrite();
  }

  void remove(Arena& arena) {
    const std::lock_guard lock(mutex_);
    if (arena.memory_ >= 0) ::close(arena.memory_);
    if (by_id_.erase(arena.id_) == 0) return;
    by_address_.erase(reinterpret_cast<std::uintptr_t>(arena.data_));
    rewrite();
  }

  ArenaLocation find(std::uintptr_t begin, std::size_t nbytes) const {
    for (;;) {
      const std::uint64_t version = version_.load(std::memory_order_acquire);
      const std::size_t count = count_.load(std::memory_order_acquire);
      if (count == 0) return {};
      const ArenaLocation location = look(*table_.load(std::memory_order_acquire), count, begin, nbytes);
      if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) return location;
    }
  }

  bool lives(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    return by_id_.contains(id);
  }

  Descriptor memory(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto entry = by_id_.find(id);
    return entry == by_id_.end() ? Descriptor() : Descriptor(::fcntl(entry->second->memory_, F_DUPFD_CLOEXEC, 0));
  }

 private:
  struct Entry {
    // Written with the mutex, and read without it; `version_` tells whether the values belong together.
    std::atomic<std::uintptr_t> begin;
    std::atomic<std::uintptr_t> end;
    std::atomic<std::uint64_t> id;
  };
  using Table = std::vector<Entry>;

  ArenaRegistry() {
    grow(first_capacity);
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().become_private(); });
  }

  void grow(std::size_t capacity) {
    tables_.push_back(std::make_unique<Table>(capacity));
    table_.store(tables_.back().get(), std::memory_order_release);
  }

  void rewrite() {
    version_.fetch_add(1, std::memory_order_relaxed);
    if (by_address_.size() > tables_.back()->size()) grow(2 * tables_.back()->size());
    Entry* entry = tables_.back()->data();
    // release: a reader that sees one of these values also sees the odd version
    for (const auto& [begin, arena] : by_address_) {
      entry->begin.store(begin, std::memory_order_release);
      entry->end.store(begin + arena->nbytes_, std::memory_order_release);
      entry->id.store(arena->id_, std::memory_order_release);
      ++entry;
    }
    count_.store(by_address_.size(), std::memory_order_release);
    version_.fetch_add(1, std::memory_order_release);
  }

  // A count that belongs to another table is detected by the version afterwards.
  static ArenaLocation look(const Table& table, std::size_t count, std::uintptr_t begin, std::size_t nbytes) {
    std::size_t low = 0;
    std::size_t high = count < table.size() ? count : table.size();
    while (low < high) {  // the first arena that begins behind `begin`
      const std::size_t middle = (low + high) / 2;
      if (table[middle].begin.load(std::memory_order_acquire) <= begin)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == 0) return {};
    const Entry& entry = table[low - 1];
    const std::uintptr_t start = entry.begin.load(std::memory_order_acquire);
    const std::uintptr_t end = entry.end.load(std::memory_order_acquire);
    if (begin >= end || nbytes > end - begin) return {};
    return {entry.id.load(std::memory_order_acquire), begin - start};
  }

  // Makes all arenas private to a forked child. The child runs this as its only thread, and has held the mutex since
  // before the fork.
  void become_private() {
    for (const auto& [begin, arena] : by_address_) {
      ::mmap(arena->data_, arena->nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
             arena->memory_, 0);
      ::close(std::exchange(arena->memory_, -1));
    }
    by_address_.clear();
    by_id_.clear();
    rewrite();
    mutex_.unlock();
  }

  std::mutex mutex_;  // guards all changes
  // Odd while the table is rewritten. A reader looks at it before and after, and repeats its look if it has changed.
  std::atomic<std::uint64_t> version_{0};
  // The number of arenas in the table, and the latest table. A reader takes both without the mutex.
  std::atomic<std::size_t> count_{0};
  std::atomic<Table*> table_{nullptr};
  // All tables that were ever used. They stay, because a reader may still be in an old one.
  std::vector<std::unique_ptr<Table>> tables_;
  std::map<std::uintptr_t, Arena*> by_address_;
  std::map<std::uint64_t, Arena*> by_id_;
  std::uint64_t last_id_ = 0;
};

Arena::Arena(std::size_t nbytes) : nbytes_(nbytes) {
  check_available(nbytes);
  Descriptor memory = make_memory(nbytes);
  data_ = map_memory(memory.get(), nbytes, PROT_READ | PROT_WRITE);
  memory_ = memory.release();
  ArenaRegistry::instance().add(*this);
}

Arena::~Arena() {
  ArenaRegistry::instance().remove(*this);
  ::munmap(data_, nbytes_);
}

ArenaLocation find_arena(const std::byte* data, std::size_t nbytes) {
  return ArenaRegistry::instance().find(reinterpret_cast<std::uintptr_t>(data), nbytes);
}

bool arena_exists(std::uint64_t id) { return ArenaRegistry::instance().lives(id); }

Descriptor arena_memory(std::uint64_t id) { return ArenaRegistry::instance().memory(id); }

}  // namespace unisono
