#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "hostile.h"
#include "ranks.h"
#include "shm/shm_channel.h"
#include "shm/single_copy_policy.h"
#include "system/cache_line.h"

using namespace unisono;
using namespace unisono::testing;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t page = 4096;
constexpr std::uint32_t slot_nbytes = 64 << 10;
constexpr std::size_t least_nbytes = SingleCopyPolicy::least_nbytes;
// After this many messages of one length, some have gone through slots and some by single copy.
constexpr int messages_for_both_ways = 8;

Header header_of(std::size_t nbytes) { return {11, nbytes, 22, 0, 33, kind_collective}; }

Bytes pattern(std::size_t nbytes) {
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::byte>(i * 31 + (i >> 8));
  return bytes;
}

// Emulators of other processors lack this system call. Without it, every message goes through slots.
bool has_process_vm_readv() {
  std::byte from{5}, to{};
  const iovec here{&to, 1}, there{&from, 1};
  return ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == 1;
}

// Sends a message, and receives it in parts of random lengths at a random offset in a cache line. Returns whether it
// went by single copy.
bool carry(Channel& from, Channel& to, const Bytes& data, Dice& dice, Incoming incoming = Incoming::kept) {
  const std::size_t nbytes = data.size();
  CHECK(from.begin(header_of(nbytes), Whole(data.data(), incoming)));
  std::size_t sent = from.write(data.data(), nbytes);
  const bool by_single_copy = sent == nbytes && !from.flush();  // the sender waits for the receiver's copy
  Bytes room(nbytes + cache_line);
  const auto got = std::span(room).subspan(dice.below(cache_line), nbytes);
  for (std::size_t received = 0; received < nbytes;) {
    CHECK(to.front() != nullptr && *to.front() == header_of(nbytes));
    const std::size_t part = std::min(nbytes - received, 1 + dice.below(nbytes));
    if (dice.below(2) == 0) {
      received += to.read(got.data() + received, part);
    } else {
      const auto available = to.readable();
      const std::size_t some = std::min(available.size(), part);
      std::copy_n(available.begin(), some, got.begin() + static_cast<std::ptrdiff_t>(received));
      to.consume(some);
      received += some;
    }
    if (sent < nbytes)
      sent += from.write(data.data() + sent, nbytes - sent);
    else
      from.flush();  // sends a part that the receiver could not copy, if there is one
  }
  CHECK(eventually([&] { return from.flush(); }) && to.front() == nullptr &&
        std::memcmp(got.data(), data.data(), nbytes) == 0);
  return by_single_copy;
}

void long_messages_arrive_by_slots_and_by_single_copy() {
  Dice dice(1);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  int single_copies = 0;
  for (const std::size_t nbytes : {least_nbytes, least_nbytes + 1, 3 * least_nbytes - 7, 20 * least_nbytes + 5}) {
    const Bytes data = pattern(nbytes);
    for (int i = 0; i < messages_for_both_ways; ++i)
      single_copies += carry(*pair.a, *pair.b, data, dice) + carry(*pair.b, *pair.a, data, dice);
  }
  // Without the system call, each side tries once at most, because the first failure turns single copies off.
  CHECK(has_process_vm_readv() ? single_copies > messages_for_both_ways : single_copies == 1 || single_copies == 2);
}

void short_and_one_way_messages_go_through_slots() {
  Dice dice(2);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  for (int i = 0; i < messages_for_both_ways; ++i)
    for (const auto& [nbytes, incoming] : {std::pair{least_nbytes, Incoming::none},
                                           {least_nbytes - 1, Incoming::kept},
                                           {least_nbytes - 1, Incoming::combined}})
      CHECK(!carry(*pair.a, *pair.b, pattern(nbytes), dice, incoming));
}

// Memory of which at first only the first `readable` bytes can be read.
class PartlyReadable {
 public:
  PartlyReadable(std::size_t nbytes, std::size_t readable)
      : nbytes_(nbytes),
        readable_(readable),
        data_(static_cast<std::byte*>(
            ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    const Bytes filled = pattern(nbytes);
    std::copy(filled.begin(), filled.end(), data_);
    protect(PROT_NONE);
  }
  ~PartlyReadable() { ::munmap(data_, nbytes_); }
  PartlyReadable(const PartlyReadable&) = delete;
  PartlyReadable& operator=(const PartlyReadable&) = delete;

  void make_readable() { protect(PROT_READ); }
  const std::byte* data() const { return data_; }

 private:
  void protect(int how) { CHECK(::mprotect(data_ + readable_, nbytes_ - readable_, how) == 0); }

  std::size_t nbytes_;
  std::size_t readable_;
  std::byte* data_;
};

// Begins a message from `data` that goes by single copy. Three messages before it go through slots, so that the policy
// tries the other way.
void begin_single_copy(ChannelPair& pair, const std::byte* data, std::size_t nbytes) {
  const Bytes other = pattern(nbytes);
  Bytes got(nbytes);
  for (int i = 0; i < 3; ++i) {
    CHECK(pair.a->begin(header_of(nbytes), Whole(other.data(), Incoming::kept)));
    std::size_t sent = 0, received = 0;
    while (received < nbytes) {
      sent += pair.a->write(other.data() + sent, nbytes - sent);
      CHECK(pair.b->front() != nullptr);
      received += pair.b->read(got.data() + received, nbytes - received);
    }
    CHECK(sent == nbytes && pair.a->flush());
  }
  CHECK(pair.a->begin(header_of(nbytes), Whole(data, Incoming::kept)));
  CHECK(pair.a->write(data, nbytes) == nbytes && !pair.a->flush());
}

void memory_that_the_kernel_cannot_read_goes_through_slots() {
  constexpr std::size_t nbytes = 8 * least_nbytes;
  for (const std::size_t readable : {std::size_t{0}, 5 * least_nbytes}) {
    for (const bool by_read : {true, false}) {
      ChannelPair pair = channel_pair(Transport::shm, 0, 1);
      PartlyReadable memory(nbytes, readable);
      begin_single_copy(pair, memory.data(), nbytes);
      Bytes got(nbytes);
      std::size_t received = 0;
      const auto receive = [&] {
        if (pair.b->front() == nullptr) return;
        if (by_read) {
          received += pair.b->read(got.data() + received, nbytes - received);
          return;
        }
        const auto available = pair.b->readable();
        std::copy(available.begin(), available.end(), got.begin() + static_cast<std::ptrdiff_t>(received));
        received += available.size();
        pair.b->consume(available.size());
      };
      for (int i = 0; i < 100; ++i) receive();
      CHECK(received <= readable && (received != 0) == (readable != 0 && has_process_vm_readv()));
      memory.make_readable();
      while (received < nbytes) {
        CHECK(!pair.a->flush() || received < nbytes);
        receive();
      }
      CHECK(pair.a->flush() && pair.b->front() == nullptr && got == pattern(nbytes));
      Dice dice(3);
      // The sender makes no other attempt at a single copy.
      for (int i = 0; i < messages_for_both_ways; ++i) CHECK(!carry(*pair.a, *pair.b, got, dice));
    }
  }
}

void a_refusal_at_the_end_of_a_message_is_an_error() {
  if (!has_process_vm_readv()) return;
  constexpr std::size_t nbytes = 8 * least_nbytes, readable = 5 * least_nbytes;
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  PartlyReadable memory(nbytes, readable);
  begin_single_copy(pair, memory.data(), nbytes);
  Bytes got(nbytes);
  std::size_t received = 0;
  for (std::size_t more; pair.b->front() != nullptr && (more = pair.b->read(got.data(), nbytes)) != 0;)
    received += more;
  Segment segment(pair.memory);
  // The receiver reports the first byte that it could not copy. A hostile receiver reports the end of the message.
  CHECK(segment.replace(static_cast<std::uint32_t>(received), nbytes) == 1);
  CHECK(throws<ProtocolError>([&] { pair.a->flush(); }));
}

void invalid_addresses_go_through_slots() {
  const Bytes data = pattern(least_nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  begin_single_copy(pair, data.data(), least_nbytes);
  Segment segment(pair.memory);
  const auto address = reinterpret_cast<std::uint64_t>(data.data());
  CHECK(segment.replace(static_cast<std::uint32_t>(address >> 32), 0xFFFF'FFFF) >= 1);
  Bytes got(least_nbytes);
  CHECK(pair.b->front() != nullptr && pair.b->read(got.data(), least_nbytes) == 0);
  for (std::size_t received = 0; received < least_nbytes;) {
    pair.a->flush();
    CHECK(pair.b->front() != nullptr);
    received += pair.b->read(got.data() + received, least_nbytes - received);
  }
  CHECK(pair.a->flush() && got == data);
}

// Replaces the labels of all full fragments, whichever stores wrote them. Returns the number of labels.
std::size_t relabel(Segment& segment, std::uint32_t by) {
  std::size_t replaced = 0;
  for (const std::uint32_t flags : {std::uint32_t{0}, SlotLabel::timed, SlotLabel::timed | SlotLabel::streamed})
    replaced += segment.replace(slot_nbytes | SlotLabel::in_ring | flags, by);
  return replaced;
}

void a_single_copy_where_none_is_possible_is_an_error() {
  const Bytes data(2 * least_nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  CHECK(pair.a->begin(header_of(data.size())) && pair.a->write(data.data(), data.size()) != 0);
  Segment segment(pair.memory);
  Bytes got(data.size());
  CHECK(pair.b->front() != nullptr && pair.b->read(got.data(), page) == page);  // one slot has been consumed
  CHECK(relabel(segment, SlotLabel::single_copy) != 0);
  CHECK(throws<ProtocolError>([&] { pair.b->read(got.data(), got.size()); }));

  ChannelPair another = channel_pair(Transport::shm, 0, 1);
  begin_single_copy(another, data.data(), least_nbytes);
  Segment other_segment(another.memory);
  CHECK(other_segment.replace(least_nbytes, 0) != 0);  // the length in the header
  CHECK(throws<ProtocolError>([&] { another.b->front(); }));
}

void a_fragment_longer_than_its_cell_is_an_error() {
  const Bytes data(2 * slot_nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  CHECK(pair.a->begin(header_of(data.size())) && pair.a->write(data.data(), data.size()) == data.size());
  Segment segment(pair.memory);
  CHECK(relabel(segment, slot_nbytes) != 0);
  CHECK(throws<ProtocolError>([&] { pair.b->front(); }));
}

// Returns the number of single copies among the last 20 messages to a slow reader. The reader sleeps 1 ms outside of
// each copy from a slot, and 1 ms within each part of a single copy.
int single_copies_among(std::int32_t peers) {
  constexpr std::size_t nbytes = least_nbytes;
  constexpr int messages = 40, last = 20;
  const Bytes data = pattern(nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1, peers);
  int single_copies = 0;
  for (int i = 0; i < messages; ++i) {
    CHECK(pair.a->begin(header_of(nbytes), Whole(data.data(), Incoming::combined)));
    std::size_t sent = pair.a->write(data.data(), nbytes);
    const bool by_single_copy = sent == nbytes;
    for (std::size_t received = 0; received < nbytes;) {
      CHECK(pair.b->front() != nullptr);
      if (!by_single_copy) std::this_thread::sleep_for(1ms);
      const std::size_t part = pair.b->readable().size();
      if (by_single_copy) std::this_thread::sleep_for(1ms);
      pair.b->consume(part);
      received += part;
      if (sent < nbytes) sent += pair.a->write(data.data() + sent, nbytes - sent);
    }
    CHECK(pair.a->flush());
    if (i >= messages - last) single_copies += by_single_copy;
  }
  return single_copies;
}

void among_more_than_two_ranks_the_copies_count_and_not_the_elapsed_time() {
  if (!has_process_vm_readv()) return;
  // The policy measures real time, which other programs disturb.
  CHECK(eventually([] { return single_copies_among(1) > 10; }));
  CHECK(eventually([] { return single_copies_among(3) < 10; }));
}

// Returns the number of single copies that the policy chooses for 400 messages if 64 KiB take these times.
int single_copies(SingleCopyPolicy& policy, std::size_t nbytes, bool combined, SingleCopyPolicy::Cost cost,
                  std::uint32_t rewrite_ns = 0) {
  int total = 0;
  for (int i = 0; i < 400; ++i) {
    const std::uint32_t interrupted = i % 7 == 0 ? 20 : 1;  // an interruption now and then
    SingleCopyPolicy::Costs times{};
    times[combined] = {cost.by_slots * interrupted, cost.by_single_copy * interrupted};
    total += policy.use_single_copy(nbytes, combined, times, rewrite_ns);
  }
  return total;
}

// Whether a way was used by trials alone.
bool is_rare(int times) { return times >= 3 && times < 40; }

void the_faster_way_is_used_and_the_other_one_is_tried() {
  SingleCopyPolicy policy(true);
  CHECK(is_rare(single_copies(policy, least_nbytes, false, {6000, 9000})));
  // The measurements of one class do not count for others.
  CHECK(is_rare(400 - single_copies(policy, 64 * least_nbytes, false, {12000, 7000})));
  CHECK(is_rare(400 - single_copies(policy, least_nbytes, true, {12000, 7000})));
  CHECK(is_rare(single_copies(policy, least_nbytes, false, {6000, 9000})));
  const int changed = single_copies(policy, least_nbytes, false, {20000, 9000});
  CHECK(changed > 200 && changed < 400);
}

void single_copy_is_rare_while_its_time_is_unknown() {
  SingleCopyPolicy policy(true);
  CHECK(single_copies(policy, least_nbytes, false, {6000, 0}) < 40 &&
        single_copies(policy, least_nbytes, true, {0, 0}) < 40);
}

void memory_that_is_slow_to_rewrite_goes_through_slots_if_caches_hold_it() {
  SingleCopyPolicy policy(true);
  CHECK(is_rare(single_copies(policy, least_nbytes, false, {9000, 6000}, 26000)));
  CHECK(is_rare(400 - single_copies(policy, Channel::more_than_caches_nbytes, false, {9000, 6000}, 26000)));
}

}  // namespace

int main() {
  return run_tests({
      {"long messages arrive by slots and by single copy", long_messages_arrive_by_slots_and_by_single_copy},
      {"short and one way messages go through slots", short_and_one_way_messages_go_through_slots},
      {"memory that the kernel cannot read goes through slots", memory_that_the_kernel_cannot_read_goes_through_slots},
      {"a refusal at the end of a message is an error", a_refusal_at_the_end_of_a_message_is_an_error},
      {"invalid addresses go through slots", invalid_addresses_go_through_slots},
      {"a single copy where none is possible is an error", a_single_copy_where_none_is_possible_is_an_error},
      {"a fragment longer than its cell is an error", a_fragment_longer_than_its_cell_is_an_error},
      {"among more than two ranks the copies count and not the elapsed time",
       among_more_than_two_ranks_the_copies_count_and_not_the_elapsed_time},
      {"the faster way is used and the other one is tried", the_faster_way_is_used_and_the_other_one_is_tried},
      {"memory that is slow to rewrite goes through slots if caches hold it",
       memory_that_is_slow_to_rewrite_goes_through_slots_if_caches_hold_it},
      {"single copy is rare while its time is unknown", single_copy_is_rare_while_its_time_is_unknown},
  });
}
