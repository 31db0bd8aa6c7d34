// Shared memory: a peer that follows the protocol, but writes anything into the segment between two calls of ours.
#include <sys/mman.h>

#include <utility>
#include <vector>

#include "fuzz.h"
#include "hostile.h"
#include "ranks.h"
#include "shm/single_copy_policy.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

enum Move : std::uint8_t { scribble, peer_sends, peer_receives, we_send, we_receive, number_of_moves };

// Messages of at least this length may go by single copy.
constexpr std::uint16_t long_from = 0xf000;
constexpr std::size_t most_nbytes = SingleCopyPolicy::least_nbytes + (1 << 16);

// Returns zeros of which the kernel can read only the first half.
const std::byte* half_readable() {
  static std::byte* const data = [] {
    void* memory = ::mmap(nullptr, most_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && ::mprotect(memory, most_nbytes / 2, PROT_READ) == 0);
    return static_cast<std::byte*>(memory);
  }();
  return data;
}

class Sender {
 public:
  explicit Sender(Channel& channel) : channel_(channel) {}
  // Continues the last message or, if it is complete, begins one. False if the protocol was broken.
  bool run(std::size_t nbytes) {
    static const std::vector<std::byte> zeros(most_nbytes);
    Header header{};
    header.nbytes = nbytes;
    return !throws<ProtocolError>([&] {
      if (remaining_ == 0 && channel_.flush() && channel_.begin(header, Whole(zeros.data(), Incoming::kept)))
        remaining_ = nbytes;
      remaining_ -= channel_.write(zeros.data(), remaining_);
    });
  }
  bool busy() const { return remaining_ != 0; }

 private:
  Channel& channel_;
  std::size_t remaining_ = 0;  // bytes of the message that are not yet written
};

// Returns the positions of all words of a segment that are not payload. The function finds them as the words that are
// not zero. For that, each slot carries a payload of zeros, long messages go by single copy and are refused, and both
// sides sleep.
std::vector<std::size_t> find_bookkeeping() {
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  for (int i = 0; i < 64; ++i) {
    for (const auto& [from, to] : {std::pair{pair.a.get(), pair.b.get()}, std::pair{pair.b.get(), pair.a.get()}}) {
      from->begin({1, 0, 1, 1, 1, 1});
      if (i < 32) CHECK(Drain(*to).run());
    }
  }
  ChannelPair another = channel_pair(Transport::shm, 0, 1);
  for (const auto& [from, to] : {std::pair{another.a.get(), another.b.get()}, {another.b.get(), another.a.get()}}) {
    Drain drain(*to);
    Sender sender(*from);
    for (int i = 0; i < 5; ++i) {
      do {
        CHECK(sender.run(SingleCopyPolicy::least_nbytes) && drain.run());
      } while (sender.busy());
    }
    from->flush();
    from->begin({1, most_nbytes, 1, 1, 1, 1}, Whole(half_readable(), Incoming::kept));
    drain.run();
  }
  std::vector<pollfd> descriptors;
  for (const auto& channel : {pair.a.get(), pair.b.get()}) channel->prepare_sleep(true, true, descriptors);
  std::vector<std::size_t> places = Segment(pair.memory).bookkeeping();
  for (const std::size_t place : Segment(another.memory).bookkeeping()) places.push_back(place);
  return places;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  ChannelPair pair = channel_pair(Transport::shm, 0, 1);
  Segment segment(pair.memory);
  Drain ours(*pair.a);
  Drain theirs(*pair.b);
  Sender our_sender(*pair.a);
  Sender their_sender(*pair.b);
  static const std::vector<std::size_t> places = find_bookkeeping();
  while (!input.empty()) {
    const auto move = static_cast<Move>(input.take<std::uint8_t>() % number_of_moves);
    if (move == scribble) {
      const std::size_t place = input.take<std::uint16_t>();
      const auto value = input.take<std::uint32_t>();
      segment.set(places[place % places.size()], value);
    } else if (move == peer_sends || move == we_send) {
      // Mostly a slot or less, to be fast.
      const std::size_t number = input.take<std::uint16_t>();
      const std::size_t length = number < long_from ? number % 512 : SingleCopyPolicy::least_nbytes + number;
      if (!(move == we_send ? our_sender : their_sender).run(length)) break;
    } else if (!(move == we_receive ? ours : theirs).run()) {
      break;
    }
  }
  return 0;
}
