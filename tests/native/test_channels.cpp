#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm_channel.h"
#include "tcp_channel.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;

Header header_of(std::size_t nbytes, std::uint32_t group = 0) { return {11, nbytes, 22, group, 33, kind_collective}; }

std::byte pattern(std::size_t i) { return static_cast<std::byte>(i * 31 + (i >> 8)); }

// Moves a message from one end to the other, in turns, as two processes would at the same time.
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
  const std::size_t lengths[] = {0, 1, 7, 16, 17, 65535, 65536, 65537, 200000, 0, 3 << 20, 1};
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

void what_was_sent_before_the_end_can_still_be_received() {
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

void memory_that_is_not_sealed_or_has_another_size_is_refused() {
  const auto open = [](Descriptor memory) {
    SocketPair sockets = unix_pair();
    Descriptor bell(::eventfd(0, EFD_NONBLOCK));
    Descriptor peer_bell(::eventfd(0, EFD_NONBLOCK));
    ShmChannel(1, true, std::move(memory), std::move(bell), std::move(peer_bell), std::move(sockets.a));
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

// Reads whatever comes on a channel, touching every byte; no message may give more than its header says.
class Drain {
 public:
  explicit Drain(Channel& channel) : channel_(channel) {}
  // Reads until nothing comes; false if the protocol was broken.
  bool run() {
    return !throws<ProtocolError>([&] {
      while (const Header* header = channel_.front()) {
        const std::size_t nbytes = header->nbytes;
        const auto available = channel_.readable();
        CHECK(available.size() <= nbytes - taken_);
        if (available.empty() && nbytes != 0) return;
        sum_ =
            std::accumulate(available.begin(), available.end(), sum_, [](std::byte a, std::byte b) { return a ^ b; });
        channel_.consume(available.size());
        taken_ = taken_ + available.size() == nbytes ? 0 : taken_ + available.size();
      }
    });
  }

 private:
  Channel& channel_;
  std::size_t taken_ = 0;  // of the message
  std::byte sum_{};
};

// The segment as a hostile peer maps it. Payloads in these tests are zeros, so what is not zero there is bookkeeping.
class Segment {
 public:
  explicit Segment(const Descriptor& memory)
      : words_(static_cast<std::uint32_t*>(
            ::mmap(nullptr, ShmChannel::segment_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0))) {
    CHECK(words_ != MAP_FAILED);
  }
  ~Segment() { ::munmap(words_, ShmChannel::segment_nbytes()); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::vector<std::size_t> bookkeeping() const {
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < ShmChannel::segment_nbytes() / sizeof(std::uint32_t); ++i)
      if (words_[i] != 0) places.push_back(i);
    return places;
  }
  void set(std::size_t place, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(words_[place]).store(value, std::memory_order_relaxed);
  }

 private:
  std::uint32_t* words_;
};

// A length that fits a slot, a little more than that, or anything.
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

// The bytes that a channel puts on the wire for some messages.
Bytes wire_bytes(Dice& dice) {
  SocketPair sockets = unix_pair();
  TcpChannel sender(1, std::move(sockets.a));
  const Bytes payload(2000, std::byte{9});
  for (std::size_t i = 1 + dice.below(4); i > 0; --i) {
    const std::size_t nbytes = dice.below(payload.size());
    CHECK(sender.begin(header_of(nbytes)) && sender.write(payload.data(), nbytes) == nbytes && sender.flush());
  }
  Bytes bytes(64 << 10);
  const auto got = ::recv(sockets.b.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  CHECK(got > 0);
  bytes.resize(static_cast<std::size_t>(got));
  return bytes;
}

void mutate(Bytes& bytes, Dice& dice) {
  for (std::size_t i = dice.below(4); i > 0; --i) bytes[dice.below(bytes.size())] ^= std::byte{1} << dice.below(8);
  if (dice.below(3) == 0) bytes.resize(1 + dice.below(bytes.size()));
  if (dice.below(5) == 0)
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.word());
}

void damaged_bytes_over_tcp_are_refused_or_end() {
  Dice dice(8);
  int refused = 0;
  for (int round = 0; round < 1000; ++round) {
    Bytes bytes = wire_bytes(dice);
    mutate(bytes, dice);
    SocketPair sockets = unix_pair();
    TcpChannel channel(1, std::move(sockets.b));
    Drain drain(channel);
    bool whole = true;
    for (std::size_t sent = 0; sent < bytes.size() && whole;) {
      const std::size_t part = std::min(bytes.size() - sent, 1 + dice.below(700));
      CHECK(::send(sockets.a.get(), bytes.data() + sent, part, MSG_NOSIGNAL) == static_cast<ssize_t>(part));
      sent += part;
      whole = drain.run();
    }
    sockets.a.reset();
    refused += !whole;
    CHECK(!whole || channel.front() != nullptr || channel.closed());
  }
  CHECK(refused > 150);
}

void every_flipped_bit_of_a_header_is_found() {
  Dice dice(9);
  const Bytes good = wire_bytes(dice);
  for (std::size_t bit = 0; bit < 64 * 8; ++bit) {
    Bytes bytes(good.begin(), good.begin() + 64);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    SocketPair sockets = unix_pair();
    TcpChannel channel(1, std::move(sockets.b));
    CHECK(::send(sockets.a.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == 64);
    CHECK(throws<ProtocolError>([&] { channel.front(); }));
  }
}

// A peer that knows the protocol can put any header on the wire; only what is expected may be taken.
void any_header_from_a_peer_ends_as_a_failure_of_the_call() {
  Dice dice(10);
  const Bytes zeros(70000);
  for (const Transport transport : transports) {
    for (int round = 0; round < 60; ++round) {
      Endpoint endpoint(std::make_shared<Control>(0, 2), 7, true);
      ChannelPair pair = channel_pair(transport, 0, 1);
      endpoint.add_channel(ChannelTable::receiving_lane, std::move(pair.a));
      const auto word = [&] { return static_cast<std::uint32_t>(dice.awkward()); };
      const Header header{dice.awkward(), dice.awkward(), word(), 1, word(), word()};
      CHECK(pair.b->begin(header));
      pair.b->write(zeros.data(), std::min(zeros.size(), header.nbytes));
      pair.b->flush();
      Bytes room(10);  // no awkward number
      const auto request = endpoint.receive(1, DType::uint8, 1, room.data(), room.size(), {});
      CHECK(endpoint.wait(*request, 20, nullptr) == Outcome::failed);
      CHECK(endpoint.control().failure().kind != FailureKind::timeout);
    }
  }
}

void a_sleeping_rank_is_woken_by_what_arrives_and_by_room() {
  using namespace std::chrono_literals;
  for (const Transport transport : transports) {
    ChannelPair pair = channel_pair(transport, 0, 1);
    constexpr std::size_t nbytes = 8 << 20;
    const Bytes data(nbytes, std::byte{3});
    const auto sleep_on = [](Channel& channel, bool sends, auto&& try_again) {
      std::vector<pollfd> descriptors;
      channel.prepare_sleep(sends, !sends, descriptors);
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
      {"what was sent before the end can still be received", what_was_sent_before_the_end_can_still_be_received},
      {"memory that is not sealed or has another size is refused",
       memory_that_is_not_sealed_or_has_another_size_is_refused},
      {"scribbled shared memory does no harm", scribbled_shared_memory_does_no_harm},
      {"a peer that scribbles all the time does no harm", a_peer_that_scribbles_all_the_time_does_no_harm},
      {"damaged bytes over TCP are refused or end", damaged_bytes_over_tcp_are_refused_or_end},
      {"every flipped bit of a header is found", every_flipped_bit_of_a_header_is_found},
      {"any header from a peer ends as a failure of the call", any_header_from_a_peer_ends_as_a_failure_of_the_call},
      {"a sleeping rank is woken by what arrives and by room", a_sleeping_rank_is_woken_by_what_arrives_and_by_room},
  });
}
