#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm/arena.h"
#include "shm/arena_link.h"
#include "shm/shm_channel.h"
#include "shm/store_policy.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t page = 4096;

Header header_of(std::size_t nbytes) { return {11, nbytes, 22, 0, 33, kind_collective}; }

void write_pattern(std::byte* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(i * 31 + (i >> 8));
}

void an_address_is_found_in_its_arena_while_the_arena_lives() {
  Dice dice(1);
  std::vector<std::unique_ptr<Arena>> arenas;
  for (int round = 0; round < 400; ++round) {
    if (arenas.empty() || dice.below(3) != 0) {
      arenas.push_back(std::make_unique<Arena>(page * (1 + dice.below(4))));
    } else {
      const auto victim = arenas.begin() + static_cast<std::ptrdiff_t>(dice.below(arenas.size()));
      const std::uint64_t id = find_arena((*victim)->data(), 1).id;
      arenas.erase(victim);
      CHECK(!arena_exists(id) && !arena_memory(id).valid());
    }
    for (const auto& arena : arenas) {
      const std::size_t offset = dice.below(arena->nbytes());
      const ArenaLocation place = find_arena(arena->data() + offset, arena->nbytes() - offset);
      CHECK(arena_exists(place.id) && place.offset == offset && arena_memory(place.id).valid());
      CHECK(find_arena(arena->data() + offset, arena->nbytes() - offset + 1).id == 0);
    }
  }
  const Bytes elsewhere(100);
  CHECK(find_arena(elsewhere.data(), elsewhere.size()).id == 0);
}

void arenas_are_found_while_others_come_and_go() {
  const Arena steady(page);
  const std::uint64_t id = find_arena(steady.data(), page).id;
  std::atomic<bool> stop{false};
  std::thread other([&] {
    std::vector<std::unique_ptr<Arena>> arenas;
    for (int round = 0; round < 30; ++round) {
      for (int i = 0; i < 70; ++i) arenas.push_back(std::make_unique<Arena>(page));
      arenas.clear();
    }
    stop = true;
  });
  while (!stop) {
    const ArenaLocation place = find_arena(steady.data() + 5, 7);
    CHECK(place.id == id && place.offset == 5);
  }
  other.join();
}

void an_arena_that_exceeds_the_memory_is_refused() {
  CHECK(throws<std::bad_alloc>([] { Arena(std::size_t{1} << 46); }));
  CHECK(throws<std::bad_alloc>([] { Arena(~std::size_t{0} >> 1); }));
}

void a_forked_child_cannot_change_an_arena_of_its_parent() {
  Arena arena(page);
  arena.data()[3] = std::byte{1};
  const ::pid_t child = ::fork();
  if (child == 0) {
    const bool same = arena.data()[3] == std::byte{1};
    arena.data()[3] = std::byte{2};
    ::_exit(same && find_arena(arena.data(), 1).id == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  CHECK(arena.data()[3] == std::byte{1} && find_arena(arena.data(), 1).id != 0);
}

// Sends a payload that lies in an arena, and receives it in parts of random lengths.
void carry(Channel& from, Channel& to, const std::byte* data, std::size_t nbytes, Dice& dice) {
  CHECK(from.begin(header_of(nbytes), data));
  CHECK(from.write(data, nbytes) == nbytes);
  CHECK(eventually([&] { return to.front() != nullptr; }) && *to.front() == header_of(nbytes));
  CHECK(nbytes < Channel::least_whole_nbytes || to.readable().size() == nbytes);
  Bytes got(nbytes);
  for (std::size_t received = 0; received < nbytes;) {
    CHECK(nbytes < Channel::least_whole_nbytes || !from.flush());
    const std::size_t part = std::min(nbytes - received, 1 + dice.below(nbytes));
    if (dice.below(2) == 0) {
      CHECK(to.read(got.data() + received, part) == part);
    } else {
      std::memcpy(got.data() + received, to.readable().data(), part);
      to.consume(part);
    }
    received += part;
  }
  CHECK(from.flush() && to.front() == nullptr && std::equal(got.begin(), got.end(), data));
}

void messages_from_an_arena_are_read_in_place() {
  Dice dice(2);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  Arena arena(5 << 20);
  write_pattern(arena.data(), arena.nbytes());
  for (int round = 0; round < 60; ++round) {
    const std::size_t offset = dice.below(arena.nbytes() - (120 << 10));
    const std::size_t most = dice.below(2) == 0 ? arena.nbytes() - offset : 120 << 10;
    carry(*pair.a, *pair.b, arena.data() + offset, 1 + dice.below(most), dice);
    carry(*pair.b, *pair.a, arena.data() + offset, 1 + dice.below(most), dice);
  }
}

void memory_outside_of_arenas_is_copied() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  const Bytes outside(100000, std::byte{9});
  CHECK(pair.a->begin(header_of(100000), outside.data()) && pair.a->write(outside.data(), 100000) == 100000);
  CHECK(pair.a->flush());  // done before a rank has received the message, because it was copied
}

std::size_t entries(const char* directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator()));
}

std::size_t arena_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("unisono-arena") != std::string::npos;
  return count;
}

void destroyed_arenas_leave_no_mapping_and_no_descriptor() {
  Dice dice(3);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  const std::size_t descriptors = entries("/proc/self/fd");
  for (int round = 0; round < 500; ++round) {
    Arena arena(64 << 10);
    write_pattern(arena.data(), arena.nbytes());
    carry(*pair.a, *pair.b, arena.data(), arena.nbytes(), dice);
    CHECK(arena_mappings() == 2);  // the arena's mapping and its receiver's
  }
  CHECK(entries("/proc/self/fd") == descriptors && arena_mappings() == 1);
  pair.b.reset();
  CHECK(arena_mappings() == 0);
}

void a_message_outlives_its_arena_and_its_sender() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  auto arena = std::make_unique<Arena>(64 << 10);
  write_pattern(arena->data(), arena->nbytes());
  const Bytes expected(arena->data(), arena->data() + arena->nbytes());
  CHECK(pair.a->begin(header_of(expected.size()), arena->data()));
  arena.reset();
  pair.a.reset();
  CHECK(pair.b->closed());  // although a passed descriptor is still in the socket
  Bytes got(expected.size());
  CHECK(pair.b->front() != nullptr && pair.b->read(got.data(), got.size()) == got.size() && got == expected);
}

// Both ends of passing arenas, without a channel.
struct Link {
  SocketPair sockets = unix_pair();
  PassedArenas passed;
  ReceivedArenas taken;

  bool refuses(const ArenaReference& reference, std::uint64_t nbytes) {
    return throws<ProtocolError>([&] { taken.at(reference, nbytes, sockets.b.get()); });
  }
};

void references_outside_of_passed_arenas_are_refused() {
  Link link;
  const Arena arena(4 * page);
  const auto good = link.passed.refer(arena.data() + 100, page, link.sockets.a.get());
  CHECK(good && good->offset == 100);
  CHECK(link.taken.at(*good, page, link.sockets.b.get()) != nullptr);
  CHECK(link.refuses({good->number + 1, good->passed, 0}, 1));
  CHECK(link.refuses({good->number, good->passed + 1, 0}, 1));
  CHECK(link.refuses({good->number, good->passed - 1, 0}, 1));
  CHECK(link.refuses({good->number, good->passed, 1}, 4 * page));
  CHECK(link.refuses({good->number, good->passed, 4 * page + 1}, 0));
  CHECK(link.refuses({good->number, good->passed, ~std::uint64_t{0}}, 2));
  CHECK(link.refuses({good->number, good->passed, 1}, ~std::uint64_t{0}));
  CHECK(link.taken.at({good->number, good->passed, 0}, 4 * page, link.sockets.b.get()) != nullptr);
}

void send_with(int socket, std::uint32_t number, std::vector<int> descriptors) {
  iovec part{&number, sizeof number};
  alignas(cmsghdr) char room[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = room;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(control), descriptors.data(), descriptors.size() * sizeof(int));
  }
  CHECK(::sendmsg(socket, &message, 0) == sizeof number);
}

Descriptor memory_of(std::size_t nbytes, int seals) {
  Descriptor memory(::memfd_create("unisono-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(::ftruncate(memory.get(), static_cast<off_t>(nbytes)) == 0 && ::fcntl(memory.get(), F_ADD_SEALS, seals) == 0);
  return memory;
}

void invalid_passed_descriptors_are_refused_and_closed() {
  const Descriptor good = memory_of(page, F_SEAL_SHRINK);
  const Descriptor unsealed = memory_of(page, F_SEAL_GROW);
  const Descriptor empty = memory_of(0, F_SEAL_SHRINK);
  const Descriptor vast = memory_of(std::size_t{1} << 62, F_SEAL_SHRINK);
  const Descriptor file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const auto refused = [](std::uint32_t number, std::vector<int> descriptors) {
    Link link;
    const std::size_t before = entries("/proc/self/fd");
    send_with(link.sockets.a.get(), number, descriptors);
    return link.refuses({number, 1, 0}, 1) && entries("/proc/self/fd") == before;
  };
  CHECK(refused(0, {unsealed.get()}) && refused(0, {empty.get()}) && refused(0, {vast.get()}));
  CHECK(refused(0, {file.get()}) && refused(0, {}));
  CHECK(refused(1, {good.get()}) && refused(~0u, {good.get()}));
  Link link;
  [[maybe_unused]] const std::size_t before = entries("/proc/self/fd");
  send_with(link.sockets.a.get(), 0, {good.get(), file.get(), file.get()});  // only the first descriptor is taken
  CHECK(link.taken.at({0, 1, 0}, page, link.sockets.b.get()) != nullptr);
#if defined(__x86_64__)  // other processors are emulated, and the emulator itself keeps the other descriptors
  CHECK(entries("/proc/self/fd") == before);
#endif
  CHECK(link.refuses({0, 1, 0}, page + 1));  // the memory is shorter than the sender claims
}

// A hostile peer may put any numbers into slots that carry references.
void scribbled_references_do_no_harm() {
  Dice dice(4);
  const Arena arena(256 << 10);
  int refused = 0;
  for (int round = 0; round < 200; ++round) {
    ChannelPair pair = channel_pair(Transport::shm, 0, 1);
    const std::size_t nbytes = Channel::least_whole_nbytes + dice.below(150 << 10);
    CHECK(pair.a->begin(header_of(nbytes), arena.data()));
    void* mapped =
        ::mmap(nullptr, ShmChannel::segment_nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, pair.memory.get(), 0);
    CHECK(mapped != MAP_FAILED);
    auto* words = static_cast<std::uint32_t*>(mapped);
    for (std::size_t i = 0; i < ShmChannel::segment_nbytes() / sizeof *words; ++i)
      if (words[i] != 0 && dice.below(3) == 0) words[i] = static_cast<std::uint32_t>(dice.awkward());
    ::munmap(mapped, ShmChannel::segment_nbytes());
    refused += throws<ProtocolError>([&] {
      const Header* header = pair.b->front();
      if (header == nullptr) return;
      const std::uint64_t left = header->nbytes;
      const auto available = pair.b->readable();
      CHECK(available.size() <= left);
      std::size_t zeros = 0;
      for (const std::byte each : available) zeros += each == std::byte{0};
      CHECK(zeros == available.size());
      pair.b->consume(available.size());
    });
  }
  CHECK(refused > 20);
}

void slots_are_filled_exactly_at_any_alignment() {
  Dice dice(5);
  Bytes from(70000);
  write_pattern(from.data(), from.size());
  StorePolicy policy;
  for (int round = 0; round < 2000; ++round) {
    const std::size_t nbytes = dice.below(2) == 0 ? dice.below(300) : dice.below(30000);
    const std::size_t source = dice.below(100);
    const std::size_t begin = 1 + dice.below(100);
    Bytes to(nbytes + 200, std::byte{77});
    if (round % 2 == 0)
      copy_streaming(to.data() + begin, from.data() + source, nbytes);
    else
      policy.fill(to.data() + begin, from.data() + source, nbytes,
                  {round % 4 == 1 ? Stores::streaming : Stores::ordinary, round % 8 < 4});
    fence_streaming_stores();
    CHECK(to[begin - 1] == std::byte{77} && to[begin + nbytes] == std::byte{77});
    CHECK(std::memcmp(to.data() + begin, from.data() + source, nbytes) == 0);
  }
}

// Returns how often the policy chooses each kind of stores in `fills` fills, if writing and reading 64 KiB take these
// times.
constexpr int fills = 2560;
std::array<int, store_ways> chosen(StorePolicy& policy, std::array<int, store_ways> write_ns,
                                   const StorePolicy::ReadTimes& read_ns) {
  std::array<int, store_ways> times{};
  for (int i = 0; i < fills; ++i) {
    const Way way = policy.choose(64 << 10, [&] { return read_ns; });
    const auto stores = static_cast<std::size_t>(way.stores);
    ++times[stores];
    // An interruption makes every seventh time longer.
    if (way.timed)
      policy.observe(way.stores, std::chrono::nanoseconds(i % 7 == 0 ? 900'000 : write_ns[stores]), 64 << 10);
  }
  return times;
}

void the_faster_stores_are_used_and_the_other_ones_are_tried() {
  CHECK(StorePolicy().choose(100, [] { return StorePolicy::ReadTimes{1, 1}; }).stores == Stores::ordinary);
  StorePolicy policy;
  const auto near = chosen(policy, {5000, 4000}, {1500, 3500});
#if defined(__x86_64__)
  CHECK(near[0] > fills - 30 && near[1] >= 10);
  const auto far = chosen(policy, {26000, 2000}, {3000, 3500});  // as if the cores had been moved
  CHECK(far[1] > fills - 600 && far[0] >= 1);
  const auto settled = chosen(policy, {26000, 2000}, {3000, 3500});
  CHECK(settled[0] >= 1 && settled[0] <= 2);  // the slower stores are, the more rarely the policy tries them
  const auto slow_reader = chosen(policy, {6000, 4000}, {4000, 9000});  // faster to write, but slower in sum
  CHECK(slow_reader[0] > fills - 1000 && slow_reader[1] >= 5);
  StorePolicy another;
  const auto alike = chosen(another, {6000, 5900}, {4000, 4000});  // too similar for a change
  CHECK(alike[0] > fills - 30);
#else
  CHECK(near[0] == fills);
#endif
}

void most_fills_are_not_timed() {
  StorePolicy policy;
  int asked = 0, timed = 0;
  for (int i = 0; i < fills; ++i) {
    const Way way = policy.choose(64 << 10, [&] {
      ++asked;
      return StorePolicy::ReadTimes{4000, 4000};
    });
    timed += way.timed;
    if (way.timed) policy.observe(way.stores, std::chrono::nanoseconds(5000), 64 << 10);
  }
  CHECK(asked == timed && timed <= fills / 8 + 10);
#if defined(__x86_64__)
  CHECK(timed >= fills / 8);
#endif
}

void ordinary_stores_are_used_until_the_reader_reports_times() {
  StorePolicy policy;
  const auto unknown = chosen(policy, {26000, 2000}, {0, 0});
  CHECK(unknown[0] > fills - 30);
}

}  // namespace

int main() {
  return run_tests({
      {"an address is found in its arena while the arena lives",
       an_address_is_found_in_its_arena_while_the_arena_lives},
      {"arenas are found while others come and go", arenas_are_found_while_others_come_and_go},
      {"an arena that exceeds the memory is refused", an_arena_that_exceeds_the_memory_is_refused},
      {"a forked child cannot change an arena of its parent", a_forked_child_cannot_change_an_arena_of_its_parent},
      {"messages from an arena are read in place", messages_from_an_arena_are_read_in_place},
      {"memory outside of arenas is copied", memory_outside_of_arenas_is_copied},
      {"destroyed arenas leave no mapping and no descriptor", destroyed_arenas_leave_no_mapping_and_no_descriptor},
      {"a message outlives its arena and its sender", a_message_outlives_its_arena_and_its_sender},
      {"references outside of passed arenas are refused", references_outside_of_passed_arenas_are_refused},
      {"invalid passed descriptors are refused and closed", invalid_passed_descriptors_are_refused_and_closed},
      {"scribbled references do no harm", scribbled_references_do_no_harm},
      {"the faster stores are used and the other ones are tried",
       the_faster_stores_are_used_and_the_other_ones_are_tried},
      {"most fills are not timed", most_fills_are_not_timed},
      {"ordinary stores are used until the reader reports times",
       ordinary_stores_are_used_until_the_reader_reports_times},
      {"slots are filled exactly at any alignment", slots_are_filled_exactly_at_any_alignment},
  });
}
