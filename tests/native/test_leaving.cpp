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

#include "cache_line.h"
#include "check.h"
#include "hostile.h"
#include "ranks.h"
#include "shm_channel.h"
#include "single_copy_policy.h"

using namespace unisono;
using namespace unisono::testing;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t page = 4096;
constexpr std::uint32_t slot_nbytes = 64 << 10;
constexpr std::size_t least = SingleCopyPolicy::least_nbytes;
// After this many messages of one length, both ways have been used.
constexpr int both_ways = 8;

Header header_of(std::size_t nbytes) { return {11, nbytes, 22, 0, 33, kind_collective}; }

Bytes pattern(std::size_t nbytes) {
  Bytes made(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) made[i] = static_cast<std::byte>(i * 31 + (i >> 8));
  return made;
}

// Emulators of other processors lack this system call.
bool kernel_reads() {
  std::byte from{5}, to{};
  const iovec here{&to, 1}, there{&from, 1};
  return ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == 1;
}

// Receives a message in parts of many lengths, at any offset in a cache line. Returns whether it came by single copy.
bool carry(Channel& from, Channel& to, const Bytes& data, Dice& dice, Incoming incoming = Incoming::kept) {
  const std::size_t nbytes = data.size();
  CHECK(from.begin(header_of(nbytes), Whole(data.data(), incoming)));
  std::size_t sent = from.write(data.data(), nbytes);
  const bool left = sent == nbytes && !from.flush();
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
      from.flush();  // sends a refused part, if there is one
  }
  CHECK(eventually([&] { return from.flush(); }) && to.front() == nullptr &&
        std::memcmp(got.data(), data.data(), nbytes) == 0);
  return left;
}

void long_messages_arrive_whether_they_were_left_or_not() {
  Dice dice(1);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  int left = 0;
  for (const std::size_t nbytes : {least, least + 1, 3 * least - 7, 20 * least + 5}) {
    const Bytes data = pattern(nbytes);
    for (int i = 0; i < both_ways; ++i)
      left += carry(*pair.a, *pair.b, data, dice) + carry(*pair.b, *pair.a, data, dice);
  }
  // at most once on each side, which then knows that it fails
  CHECK(kernel_reads() ? left > both_ways : left == 1 || left == 2);
}

void what_is_short_or_sent_by_a_rank_that_does_not_receive_goes_through_slots() {
  Dice dice(2);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  for (int i = 0; i < both_ways; ++i)
    for (const auto& [nbytes, incoming] :
         {std::pair{least, Incoming::none}, {least - 1, Incoming::kept}, {least - 1, Incoming::combined}})
      CHECK(!carry(*pair.a, *pair.b, pattern(nbytes), dice, incoming));
}

// Memory whose second part cannot be read for a while.
class Veiled {
 public:
  Veiled(std::size_t nbytes, std::size_t readable)
      : nbytes_(nbytes),
        readable_(readable),
        data_(static_cast<std::byte*>(
            ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    const Bytes filled = pattern(nbytes);
    std::copy(filled.begin(), filled.end(), data_);
    protect(PROT_NONE);
  }
  ~Veiled() { ::munmap(data_, nbytes_); }
  Veiled(const Veiled&) = delete;
  Veiled& operator=(const Veiled&) = delete;

  void unveil() { protect(PROT_READ); }
  const std::byte* data() const { return data_; }

 private:
  void protect(int how) { CHECK(::mprotect(data_ + readable_, nbytes_ - readable_, how) == 0); }

  std::size_t nbytes_;
  std::size_t readable_;
  std::byte* data_;
};

// Sends messages until one goes by single copy.
void leave(ChannelPair& pair, const std::byte* data, std::size_t nbytes) {
  const Bytes other = pattern(nbytes);
  Bytes got(nbytes);
  for (int i = 0; i < 3; ++i) {  // the first ones go through slots
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

void what_cannot_be_read_is_refused_and_goes_through_slots() {
  constexpr std::size_t nbytes = 8 * least;
  for (const std::size_t readable : {std::size_t{0}, 5 * least}) {
    for (const bool plainly : {true, false}) {
      ChannelPair pair = channel_pair(Transport::shm, 0, 1);
      Veiled veiled(nbytes, readable);
      leave(pair, veiled.data(), nbytes);
      Bytes got(nbytes);
      std::size_t received = 0;
      const auto receive = [&] {
        if (pair.b->front() == nullptr) return;
        if (plainly) {
          received += pair.b->read(got.data() + received, nbytes - received);
          return;
        }
        const auto available = pair.b->readable();
        std::copy(available.begin(), available.end(), got.begin() + static_cast<std::ptrdiff_t>(received));
        received += available.size();
        pair.b->consume(available.size());
      };
      for (int i = 0; i < 100; ++i) receive();
      CHECK(received <= readable && (received != 0) == (readable != 0 && kernel_reads()));
      veiled.unveil();
      while (received < nbytes) {
        CHECK(!pair.a->flush() || received < nbytes);
        receive();
      }
      CHECK(pair.a->flush() && pair.b->front() == nullptr && got == pattern(nbytes));
      Dice dice(3);
      for (int i = 0; i < both_ways; ++i) CHECK(!carry(*pair.a, *pair.b, got, dice));  // it does not try again
    }
  }
}

void a_refusal_beyond_the_end_is_an_error() {
  if (!kernel_reads()) return;
  constexpr std::size_t nbytes = 8 * least, readable = 5 * least;
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  Veiled veiled(nbytes, readable);
  leave(pair, veiled.data(), nbytes);
  Bytes got(nbytes);
  std::size_t received = 0;
  for (std::size_t more; pair.b->front() != nullptr && (more = pair.b->read(got.data(), nbytes)) != 0;)
    received += more;
  Segment segment(pair.memory);
  CHECK(segment.replace(static_cast<std::uint32_t>(received), nbytes) == 1);
  CHECK(throws<ProtocolError>([&] { pair.a->flush(); }));
}

void addresses_that_are_none_are_refused() {
  const Bytes data = pattern(least);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  leave(pair, data.data(), least);
  Segment segment(pair.memory);
  const auto address = reinterpret_cast<std::uint64_t>(data.data());
  CHECK(segment.replace(static_cast<std::uint32_t>(address >> 32), 0xFFFF'FFFF) >= 1);
  Bytes got(least);
  CHECK(pair.b->front() != nullptr && pair.b->read(got.data(), least) == 0);
  for (std::size_t received = 0; received < least;) {
    pair.a->flush();
    CHECK(pair.b->front() != nullptr);
    received += pair.b->read(got.data() + received, least - received);
  }
  CHECK(pair.a->flush() && got == data);
}

// Replaces the labels of complete fragments, however these were stored; returns their number.
std::size_t relabel(Segment& segment, std::uint32_t by) {
  std::size_t found = 0;
  for (const std::uint32_t how : {std::uint32_t{0}, SlotLabel::timed, SlotLabel::timed | SlotLabel::streamed})
    found += segment.replace(slot_nbytes | SlotLabel::in_ring | how, by);
  return found;
}

void what_says_that_it_was_left_where_it_cannot_be_is_an_error() {
  const Bytes data(2 * least);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  CHECK(pair.a->begin(header_of(data.size())) && pair.a->write(data.data(), data.size()) != 0);
  Segment segment(pair.memory);
  Bytes got(data.size());
  CHECK(pair.b->front() != nullptr && pair.b->read(got.data(), page) == page);  // one slot has been consumed
  CHECK(relabel(segment, SlotLabel::single_copy) != 0);
  CHECK(throws<ProtocolError>([&] { pair.b->read(got.data(), got.size()); }));

  ChannelPair another = channel_pair(Transport::shm, 0, 1);
  leave(another, data.data(), least);
  Segment of_another(another.memory);
  CHECK(of_another.replace(least, 0) != 0);  // in the header
  CHECK(throws<ProtocolError>([&] { another.b->front(); }));
}

void what_does_not_fit_into_a_cell_is_not_read_from_it() {
  const Bytes data(2 * slot_nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  CHECK(pair.a->begin(header_of(data.size())) && pair.a->write(data.data(), data.size()) == data.size());
  Segment segment(pair.memory);
  CHECK(relabel(segment, slot_nbytes) != 0);
  CHECK(throws<ProtocolError>([&] { pair.b->front(); }));
}

// The number of single copies among the last messages, if their reader waits between two slots, and half as long for
// each part of a single copy.
int left_by_a_rank_with(std::int32_t peers) {
  constexpr std::size_t nbytes = least;
  constexpr int messages = 40, last = 20;
  const Bytes data = pattern(nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1, peers);
  int found = 0;
  for (int i = 0; i < messages; ++i) {
    CHECK(pair.a->begin(header_of(nbytes), Whole(data.data(), Incoming::combined)));
    std::size_t sent = pair.a->write(data.data(), nbytes);
    const bool left = sent == nbytes;
    for (std::size_t received = 0; received < nbytes;) {
      CHECK(pair.b->front() != nullptr);
      if (!left) std::this_thread::sleep_for(1ms);
      const std::size_t part = pair.b->readable().size();
      if (left) std::this_thread::sleep_for(1ms);
      pair.b->consume(part);
      received += part;
      if (sent < nbytes) sent += pair.a->write(data.data() + sent, nbytes - sent);
    }
    CHECK(pair.a->flush());
    if (i >= messages - last) found += left;
  }
  return found;
}

void among_more_than_two_ranks_the_work_counts_and_not_the_time() {
  if (!kernel_reads()) return;
  CHECK(left_by_a_rank_with(1) > 10);
  CHECK(left_by_a_rank_with(3) < 10);
}

// The number of single copies among 400 messages, for given times of 64 KiB.
int left(SingleCopyPolicy& policy, std::size_t nbytes, bool combined, SingleCopyPolicy::Cost cost,
         std::uint32_t again_ns = 0) {
  int found = 0;
  for (int i = 0; i < 400; ++i) {
    const std::uint32_t interrupted = i % 7 == 0 ? 20 : 1;  // an interruption now and then
    SingleCopyPolicy::Costs times{};
    times[combined] = {cost.by_slots * interrupted, cost.by_single_copy * interrupted};
    found += policy.use_single_copy(nbytes, combined, times, again_ns);
  }
  return found;
}

bool is_now_and_then(int times) { return times >= 3 && times < 40; }

void the_quicker_way_is_taken_and_the_other_one_tried() {
  SingleCopyPolicy policy(true);
  CHECK(is_now_and_then(left(policy, least, false, {6000, 9000})));
  // The measurements of one class do not count for others.
  CHECK(is_now_and_then(400 - left(policy, 64 * least, false, {12000, 7000})));
  CHECK(is_now_and_then(400 - left(policy, least, true, {12000, 7000})));
  CHECK(is_now_and_then(left(policy, least, false, {6000, 9000})));
  const int moved = left(policy, least, false, {20000, 9000});
  CHECK(moved > 200 && moved < 400);
}

void nothing_is_left_as_long_as_nobody_tells_what_that_takes() {
  SingleCopyPolicy policy(true);
  CHECK(left(policy, least, false, {6000, 0}) < 40 && left(policy, least, true, {0, 0}) < 40);
}

void what_is_slow_to_write_again_is_not_left_unless_caches_do_not_hold_it() {
  SingleCopyPolicy policy(true);
  CHECK(is_now_and_then(left(policy, least, false, {9000, 6000}, 26000)));
  CHECK(is_now_and_then(400 - left(policy, Channel::more_than_caches_nbytes, false, {9000, 6000}, 26000)));
}

}  // namespace

int main() {
  return run_tests({
      {"long messages arrive whether they were left or not", long_messages_arrive_whether_they_were_left_or_not},
      {"what is short or sent by a rank that does not receive goes through slots",
       what_is_short_or_sent_by_a_rank_that_does_not_receive_goes_through_slots},
      {"what cannot be read is refused and goes through slots", what_cannot_be_read_is_refused_and_goes_through_slots},
      {"a refusal beyond the end is an error", a_refusal_beyond_the_end_is_an_error},
      {"addresses that are none are refused", addresses_that_are_none_are_refused},
      {"what says that it was left where it cannot be is an error",
       what_says_that_it_was_left_where_it_cannot_be_is_an_error},
      {"what does not fit into a cell is not read from it", what_does_not_fit_into_a_cell_is_not_read_from_it},
      {"among more than two ranks the work counts and not the time",
       among_more_than_two_ranks_the_work_counts_and_not_the_time},
      {"the quicker way is taken and the other one tried", the_quicker_way_is_taken_and_the_other_one_tried},
      {"what is slow to write again is not left unless caches do not hold it",
       what_is_slow_to_write_again_is_not_left_unless_caches_do_not_hold_it},
      {"nothing is left as long as nobody tells what that takes",
       nothing_is_left_as_long_as_nobody_tells_what_that_takes},
  });
}
