#include "recorder/flight_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "system/reserved_pages.h"

namespace unisono {
namespace {

constexpr std::uint64_t magic = 0x4f4e4f53494e5500;  // "\0UNISONO"
constexpr std::uint32_t memory_version = 1;
constexpr std::size_t header_nbytes = 4096;
constexpr std::size_t about_nbytes = 8192;
constexpr std::size_t communicator_slots = 256;
constexpr std::size_t communicator_nbytes = 256;
constexpr std::size_t traffic_slots = 512;
// The least number of records. Error messages quote recent calls, so some are kept even if the option asks for none.
constexpr std::size_t least_depth = 64;
constexpr std::size_t most_text_nbytes = 4096;
constexpr int seal_future_write = 0x10;  // F_SEAL_FUTURE_WRITE, which older headers lack

// A memfd of this size, or none. Only this mapping can write it.
Descriptor published_memory(std::size_t nbytes) {
  Descriptor descriptor(::memfd_create("unisono-flight-recorder", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool usable = descriptor.valid() && ::ftruncate(descriptor.get(), static_cast<::off_t>(nbytes)) == 0 &&
                      reserve_pages(descriptor.get(), nbytes);
  if (!usable) descriptor.reset();
  return descriptor;
}

Mapping map(const Descriptor& descriptor, std::size_t nbytes) {
  const int kind = descriptor.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, kind, descriptor.get(), 0);
  if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map memory");
  return {data, nbytes};
}

}  // namespace

FlightMemory::FlightMemory(std::int32_t rank, std::int32_t size, std::size_t depth)
    : depth_(std::max(depth, least_depth)) {
  const std::size_t about = header_nbytes;
  const std::size_t communicators = about + about_nbytes;
  const std::size_t traffic = communicators + communicator_slots * communicator_nbytes;
  const std::size_t records = traffic + traffic_slots * sizeof(TrafficRecord);
  const std::size_t texts = records + depth_ * sizeof(FlightRecord);
  const std::size_t nbytes = texts + texts_nbytes;
  if (depth > 0) descriptor_ = published_memory(nbytes);
  mapping_ = map(descriptor_, nbytes);
  if (descriptor_.valid()) {
    ::fcntl(descriptor_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    ::fcntl(descriptor_.get(), F_ADD_SEALS, seal_future_write | F_SEAL_SEAL);  // Linux 5.1
  }
  begin_ = static_cast<std::byte*>(mapping_.data());
  const auto at = [](std::size_t offset) { return static_cast<std::uint32_t>(offset); };
  new (begin_) FlightHeader{magic,
                            memory_version,
                            ::getpid(),
                            rank,
                            size,
                            at(about),
                            {0},
                            at(communicators),
                            at(communicator_slots),
                            at(traffic),
                            at(traffic_slots),
                            at(records),
                            at(sizeof(FlightRecord)),
                            at(depth_),
                            at(texts),
                            at(texts_nbytes),
                            {0},
                            {0},
                            {texts_end_}};
  traffic_ = new (begin_ + traffic) TrafficRecord[traffic_slots]{};
  records_ = new (begin_ + records) FlightRecord[depth_]{};
}

void FlightMemory::describe(std::string_view about) {
  if (about.size() > about_nbytes) throw std::invalid_argument("the description of the rank is too long");
  std::memcpy(begin_ + header().about_offset, about.data(), about.size());
  header().about_nbytes.store(static_cast<std::uint32_t>(about.size()), std::memory_order_release);
}

void FlightMemory::name(std::uint64_t communicator, std::string_view ranks) {
  const std::uint32_t number = header().communicators.load(std::memory_order_relaxed);
  std::byte* slot = begin_ + header().communicators_offset + number % communicator_slots * communicator_nbytes;
  std::memset(slot, 0, communicator_nbytes);
  std::memcpy(slot, &communicator, sizeof communicator);
  std::memcpy(slot + sizeof communicator, ranks.data(),
              std::min(ranks.size(), communicator_nbytes - sizeof communicator - 1));
  header().communicators.store(number + 1, std::memory_order_release);
}

TrafficSlot FlightMemory::traffic(std::int32_t peer, std::string_view transport) {
  for (TrafficRecord* record = traffic_; record != traffic_ + traffic_slots; ++record) {
    std::uint32_t expected = 0;
    if (!record->used.compare_exchange_strong(expected, 1)) continue;
    record->peer = peer;
    std::memset(record->transport, 0, sizeof record->transport);
    std::memcpy(record->transport, transport.data(), std::min(transport.size(), sizeof record->transport - 1));
    Counters& counters = record->counters;
    for (Count* count : {&counters.sent_messages, &counters.sent_nbytes, &counters.received_messages,
                         &counters.received_nbytes, &counters.waited_ns})
      count->reset();
    return TrafficSlot(record);
  }
  return {};
}

std::uint64_t FlightMemory::put(std::string_view text) {
  const std::size_t length = std::min(text.size(), most_text_nbytes);
  if (texts_end_ % texts_nbytes + length + 1 > texts_nbytes)  // a text does not go round the end of the ring
    texts_end_ += texts_nbytes - texts_end_ % texts_nbytes;
  const std::uint64_t place = texts_end_;
  texts_end_ += length + 1;
  // The new end of the texts is stored before their bytes, so that a reader notices that older texts are being
  // overwritten.
  header().texts_end.store(texts_end_, std::memory_order_seq_cst);
  std::byte* at = begin_ + header().texts_offset + place % texts_nbytes;
  std::memcpy(at, text.data(), length);
  at[length] = std::byte{0};
  return place;
}

}  // namespace unisono
