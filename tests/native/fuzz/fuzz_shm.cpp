// Shared memory: a peer that keeps to the protocol, and between any two calls of ours writes anything into the segment.
#include <utility>
#include <vector>

#include "fuzz.h"
#include "hostile.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

enum Deed : std::uint8_t { scribble, peer_sends, peer_receives, we_send, we_receive, deeds };

void send_to(Channel& channel, std::size_t nbytes) {
  static const std::vector<std::byte> zeros(1 << 18);
  Header header{};
  header.nbytes = nbytes;
  if (channel.begin(header)) channel.write(zeros.data(), nbytes);
}

// The words of a segment that are not payload: those that are not zero when each slot has been used with a payload of
// zeros and both sides wait.
std::vector<std::size_t> find_bookkeeping() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  for (int i = 0; i < 64; ++i) {
    for (const auto& [from, to] : {std::pair{pair.a.get(), pair.b.get()}, std::pair{pair.b.get(), pair.a.get()}}) {
      from->begin({1, 0, 1, 1, 1, 1});
      if (i < 32) CHECK(Drain(*to).run());
    }
  }
  std::vector<pollfd> descriptors;
  for (const auto& channel : {pair.a.get(), pair.b.get()}) channel->prepare_sleep(true, true, descriptors);
  return Segment(pair.memory).bookkeeping();
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  Segment segment(pair.memory);
  Drain ours(*pair.a);
  Drain theirs(*pair.b);
  static const std::vector<std::size_t> places = find_bookkeeping();
  while (!input.empty()) {
    const auto deed = static_cast<Deed>(input.take<std::uint8_t>() % deeds);
    if (deed == scribble) {
      const std::size_t place = input.take<std::uint16_t>();
      const auto value = input.take<std::uint32_t>();
      segment.set(places[place % places.size()], value);
    } else if (deed == peer_sends || deed == we_send) {
      // Mostly a slot or less, for the sake of speed.
      const std::size_t thirds = input.take<std::uint16_t>();
      send_to(deed == we_send ? *pair.a : *pair.b, thirds < 0x8000 ? thirds % 512 : thirds * 3);
    } else if (!(deed == we_receive ? ours : theirs).run()) {
      break;
    }
  }
  return 0;
}
