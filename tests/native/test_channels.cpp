#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "drain.h"
#include "hostile.h"
#include "ranks.h"
#include "shm/shm_channel.h"
#include "system/fence.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;

Header header_of(std::size_t nbytes, std::uint32_t group = 0) { return {11, nbytes, 22, group, 33, kind_collective}; }

std::byte pattern(std::size_t i) { return static_cast<std::byte>(i * 31 + (i >> 8)); }

// Sends a message from one end and receives it at the other, by turns, as two processes do.
void carry(Channel& from, Channel& to, std::size_t nbytes, bool in_place) {
  Bytes data(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) data[i] = pattern(i);
  Bytes got(nbytes);
  std::size_t sent = 0;
  std::size_t received = 0;
  bool flushed = false;
  CHECK(from.begin(header_of(nbytes)));
  const auto receive = [&] {
    const Header* front = to.front();
    if (front == nullptr) return false;
    CHECK(*front == header_of(nbytes));
    if (!in_place) return (received += to.read(got.data() + received, nbytes - received)) == nbytes;
    const auto available = to.readable();
    if (!available.empty()) std::memcpy(got.data() + received, available.data(), available.size());
    to.consume(available.size());
    return (received += available.size()) == nbytes;
  };
  const auto advance = [&] {
    sent += from.write(data.data() + sent, nbytes - sent);
    flushed = sent == nbytes && from.flush();
    return nbytes == 0 || receive();
  };
  CHECK(eventually(advance));
  CHECK(eventually([&] { return flushed || (flushed = from.flush()); }));
  if (nbytes == 0) {
    CHECK(eventually([&] { return to.front() != nullptr; }));
    to.consume(0);
  }
  CHECK(got == data && to.front() == nullptr);
}

void messages_arrive_whole_and_in_order() {
  const std::size_t lengths[] = {0,    1,    7,     16,    17,    2047,   2048, 2049,    4095,
                                 4096, 4097, 65535, 65536, 65537, 200000, 0,    3 << 20, 1};
  for (const Transport transport : transports) {
    for (const bool in_place : {false, true}) {
      ChannelPair pair = channel_pair(transport, 0, 1);
      for (const std::size_t nbytes : lengths) {
        carry(*pair.a, *pair.b, nbytes, in_place);
        carry(*pair.b, *pair.a, nbytes, in_place);
      }
      CHECK(pair.a->counters().sent_messages == std::size(lengths));
      CHECK(pair.a->counters().received_nbytes == pair.b->counters().sent_nbytes);
    }
  }
}

void messages_sent_before_the_end_can_still_be_received() {
  for (const Transport transport : transports) {
    ChannelPair pair = channel_pair(transport, 0, 1);
    const Bytes data(1000, std::byte{5});
    CHECK(pair.a->begin(header_of(1000)) && pair.a->write(data.data(), 1000) == 1000 && pair.a->flush());
    CHECK(!pair.b->closed());
    pair.a.reset();
    Bytes got(1000);
    CHECK(eventually([&] { return pair.b->front() != nullptr; }) && pair.b->read(got.data(), 1000) == 1000 &&
          got == data);
    CHECK(eventually([&] { return pair.b->front() == nullptr && pair.b->closed(); }));
  }
}

void may_progress_follows_sends_and_receives() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  const std::byte payload{};
  CHECK(!pair.b->may_progress(true, true));
  const auto send = [&] { return pair.a->begin(header_of(1)) && pair.a->write(&payload, 1) == 1; };
  CHECK(send() && pair.b->may_progress(false, true) && !pair.b->may_progress(true, false));
  while (send()) {
  }
  CHECK(!pair.a->may_progress(true, true));
  CHECK(pair.b->front() != nullptr);
  pair.b->consume(1);
  CHECK(pair.a->may_progress(true, false) && !pair.a->may_progress(false, true));
  CHECK(pair.b->may_progress(false, true));
}

void memory_that_is_not_sealed_or_has_another_size_is_refused() {
  const auto open = [](Descriptor memory) {
    SocketPair sockets = unix_pair();
    Descriptor bell(::eventfd(0, EFD_NONBLOCK));
    Descriptor peer_bell(::eventfd(0, EFD_NONBLOCK));
    ShmChannel(1, 1, true, std::move(memory), std::move(bell), std::move(peer_bell), std::move(sockets.a));
  };
  const auto memory_of = [](std::size_t nbytes) {
    Descriptor memory(::memfd_create("unisono-test", MFD_ALLOW_SEALING));
    CHECK(::ftruncate(memory.get(), static_cast<off_t>(nbytes)) == 0);
    return memory;
  };
  open(sealed_memory());
  CHECK(throws<ProtocolError>([&] { open(memory_of(ShmChannel::segment_nbytes())); }));
  CHECK(throws<ProtocolError>([&] { open(memory_of(ShmChannel::segment_nbytes() - 1)); }));
  CHECK(throws<ProtocolError>([&] { open(Descriptor()); }));
}

// A length that fits a slot, slightly more, or any other.
std::uint32_t hostile_word(Dice& dice) {
  const std::size_t capacity = 64 << 10;
  return static_cast<std::uint32_t>(dice.below(3) == 0 ? capacity - 1 + dice.below(3) : dice.awkward());
}

void scribbled_shared_memory_does_no_harm() {
  Dice dice(6);
  const Bytes zeros(300000);
  int refused = 0;
  for (int round = 0; round < 150; ++round) {
    ChannelPair pair = channel_pair(Transport::shm, 0, 1);
    Segment segment(pair.memory);
    for (int i = 0; i < 3; ++i) {
      const std::size_t nbytes = dice.below(4) * 60000 + dice.below(20);
      if (pair.a->begin(header_of(nbytes))) pair.a->write(zeros.data(), nbytes);
    }
    const auto places = segment.bookkeeping();
    Drain drain(*pair.b);
    for (std::size_t i = dice.below(4); i > 0; --i) segment.set(places[dice.below(places.size())], hostile_word(dice));
    refused += !drain.run();
    for (std::size_t i = dice.below(4); i > 0; --i) segment.set(places[dice.below(places.size())], hostile_word(dice));
    refused += !drain.run();
    if (pair.a->begin(header_of(0))) pair.a->flush();
  }
  CHECK(refused > 5);
}

void a_fragment_keeps_its_offset_in_a_cache_line() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  const Bytes memory(10000);
  for (const std::size_t from : {0, 1, 16, 63}) {
    const std::byte* data = memory.data() + from;
    const std::size_t nbytes = memory.size() - from;
    CHECK(pair.a->begin(header_of(nbytes)) && pair.a->write(data, nbytes) == nbytes && pair.b->front() != nullptr);
    const auto fragment = pair.b->readable();
    CHECK(fragment.size() == nbytes);
    CHECK((reinterpret_cast<std::uintptr_t>(fragment.data()) - reinterpret_cast<std::uintptr_t>(data)) % 64 == 0);
    pair.b->consume(nbytes);
  }
}

void a_fragment_outside_of_its_ring_is_refused() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  const Bytes zeros(10000);
  for (int i = 0; i < 2; ++i)
    CHECK(pair.a->begin(header_of(zeros.size())) && pair.a->write(zeros.data(), zeros.size()) == zeros.size());
  const std::size_t lead = reinterpret_cast<std::uintptr_t>(zeros.data()) % 64;
  // position of the second fragment
  const auto second = static_cast<std::uint32_t>((lead + zeros.size() + 63) / 64 * 64 + lead);
  Segment segment(pair.memory);
  CHECK(segment.replace(second, static_cast<std::uint32_t>(ShmChannel::segment_nbytes())) == 1);
  Drain drain(*pair.b);
  CHECK(!drain.run());
}

void a_peer_that_scribbles_all_the_time_does_no_harm() {
  Dice dice(7);
  const Bytes zeros(200000);
  for (int round = 0; round < 8; ++round) {
    ChannelPair pair = channel_pair(Transport::shm, 0, 1);
    if (pair.a->begin(header_of(zeros.size()))) pair.a->write(zeros.data(), zeros.size());
    Segment segment(pair.memory);
    const auto places = segment.bookkeeping();
    Drain drain(*pair.b);
    std::atomic<bool> stop{false};
    std::thread hostile([&] {
      Dice own(static_cast<std::uint64_t>(round));
      while (!stop) segment.set(places[own.below(places.size())], hostile_word(own));
    });
    for (int i = 0; i < 150; ++i) {
      drain.run();
      if (pair.b->begin(header_of(100))) pair.b->write(zeros.data(), 100);
    }
    stop = true;
    hostile.join();
  }
}

// A peer that follows the protocol can put any header on the wire. A channel may accept only the expected one.
void an_unexpected_header_fails_the_call() {
  Dice dice(10);
  const Bytes zeros(70000);
  for (const Transport transport : transports) {
    for (int round = 0; round < 60; ++round) {
      Endpoint endpoint(std::make_shared<Control>(0, 2), 7, true);
      ChannelPair pair = channel_pair(transport, 0, 1);
      endpoint.add_channel(ChannelTable::receiving_lane, std::move(pair.a));
      const auto word = [&] { return static_cast<std::uint32_t>(dice.awkward()); };
      const Header header{dice.awkward(), dice.awkward(), word(), 1, word(), word()};
      try {
        CHECK(pair.b->begin(header));
      } catch (const std::invalid_argument&) {
        continue;  // the sender of a tagged channel refuses a point-to-point message that does not lie in one piece
      }
      pair.b->write(zeros.data(), std::min(zeros.size(), header.nbytes));
      pair.b->flush();
      Bytes room(10);  // `awkward` never returns this length
      const auto request = endpoint.start(Message::to_receive(1, DType::uint8, 1, room.data(), room.size()), {});
      CHECK(endpoint.wait(*request, 20, nullptr) == Outcome::failed);
      CHECK(endpoint.control().failure().kind != FailureKind::timeout);
    }
  }
}

void a_sleeping_rank_is_woken_by_messages_and_by_space() {
  using namespace std::chrono_literals;
  for (const Transport transport : transports) {
    ChannelPair pair = channel_pair(transport, 0, 1);
    constexpr std::size_t nbytes = 8 << 20;
    const Bytes data(nbytes, std::byte{3});
    const auto sleep_on = [](Channel& channel, bool sends, auto&& try_again) {
      std::vector<pollfd> descriptors;
      channel.prepare_sleep(sends, !sends, descriptors);
      heavy_fence();
      if (!try_again()) CHECK(::poll(descriptors.data(), descriptors.size(), 20000) > 0);
      channel.cancel_sleep();
    };
    std::thread sender([&] {
      std::this_thread::sleep_for(20ms);
      CHECK(pair.a->begin(header_of(nbytes)));
      for (std::size_t sent = 0; sent < nbytes;) {
        const auto push = [&] {
          const std::size_t taken = pair.a->write(data.data() + sent, nbytes - sent);
          sent += taken;
          return taken != 0;
        };
        if (!push()) sleep_on(*pair.a, true, push);
      }
      const auto flush = [&] { return pair.a->flush(); };
      while (!flush()) sleep_on(*pair.a, true, flush);
    });
    Bytes got(nbytes);
    for (std::size_t received = 0; received < nbytes;) {
      const auto pull = [&] {
        const std::size_t part =
            pair.b->front() == nullptr ? 0 : pair.b->read(got.data() + received, nbytes - received);
        received += part;
        return part != 0;
      };
      if (!pull()) sleep_on(*pair.b, false, pull);
    }
    sender.join();
    CHECK(got == data);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"messages arrive whole and in order", messages_arrive_whole_and_in_order},
      {"messages sent before the end can still be received", messages_sent_before_the_end_can_still_be_received},
      {"may progress follows sends and receives", may_progress_follows_sends_and_receives},
      {"memory that is not sealed or has another size is refused",
       memory_that_is_not_sealed_or_has_another_size_is_refused},
      {"scribbled shared memory does no harm", scribbled_shared_memory_does_no_harm},
      {"a fragment keeps its offset in a cache line", a_fragment_keeps_its_offset_in_a_cache_line},
      {"a fragment outside of its ring is refused", a_fragment_outside_of_its_ring_is_refused},
      {"a peer that scribbles all the time does no harm", a_peer_that_scribbles_all_the_time_does_no_harm},
      {"an unexpected header fails the call", an_unexpected_header_fails_the_call},
      {"a sleeping rank is woken by messages and by space", a_sleeping_rank_is_woken_by_messages_and_by_space},
  });
}
