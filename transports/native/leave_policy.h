// Whether long messages go through slots or are left where they lie, for the reader to have the kernel copy them.
//
// Theory of operation. Slots cost two copies, one on either side; what is left costs one, on the reader's side, which
// is slower, as the kernel looks up every page. Where both sides send and receive at the same time, each of them does
// both copies: so what a reader takes from the first byte to the last, while it writes to slots itself, together with
// what had been written before, stands against what copying by the kernel takes. That is so where there are two ranks.
// Among more, a message takes as long as a third rank lets it, and all of them would leave theirs once one does: there
// it is the two copies alone that count. Both ways are tried again and again, as ways of storing are (store_policy.h),
// but several times in a row, as each leaves other things behind in the caches, and it takes slots twice their ring to
// be as fast again as they are; and apart for each length, as caches hold the shorter ones, and for what is combined as
// it is read. Of two ranks that exchange messages, one decides and the other does as it has seen: what either way takes
// depends on what the other rank does. What was left is in the caches of both afterwards, and whoever writes there next
// waits as long as for slots that the reader holds: so that is added, though it is not the message that takes it. Of
// the last few times the one in the middle counts, as the blocks of a ring, say, are in the caches in its first round
// only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>

#include "channel.h"
#include "store_policy.h"

namespace unisono {

class LeavePolicy {
 public:
  // What is shorter always goes through slots. What is combined comes in short pieces, of which ranks that wait for
  // each other's messages gain less.
  static constexpr std::size_t least_nbytes = 256 << 10;
  static constexpr std::size_t least_combined_nbytes = 1 << 20;
  static constexpr bool may_leave(std::size_t nbytes, Receipt receipt) {
    return receipt != Receipt::none && nbytes >= (receipt == Receipt::kept ? least_nbytes : least_combined_nbytes);
  }
  // What the last message has taken that was combined, or was not: nanoseconds for each 64 KiB; 0 if it is not known.
  struct Took {
    std::uint32_t by_slots;
    std::uint32_t left;
  };
  using Times = std::array<Took, 2>;

  explicit LeavePolicy(bool decides) : decides_(decides) {}
  // How many messages of a length in a row tell how long a way takes.
  static constexpr std::uint32_t burst(std::size_t nbytes) {
    constexpr std::size_t twice_a_ring = 3 << 20;
    return std::max<std::uint32_t>(RecentTimes::kept, static_cast<std::uint32_t>(twice_a_ring / floor(length(nbytes))));
  }

  // Whether the next message, which may be left, is. What the one before has taken is known by now; `again_ns` is what
  // it takes to write memory that the peer has read (0: it is not known).
  bool leaves(std::size_t nbytes, bool combined, const Times& took, std::uint32_t again_ns);
  // The peer has sent such a message.
  void see(std::size_t nbytes, bool combined, bool left) {
    if (!decides_) alike_[combined][length(nbytes)].seen = left;
  }

 private:
  struct Alike {
    explicit Alike(std::size_t number) : choice(burst(floor(number))) {}

    Choice choice;
    std::array<RecentTimes, 2> times;  // of slots, and of what was left
    std::optional<bool> seen;          // whether the peer has left one, since this rank has sent one
  };
  using Lengths = std::array<Alike, 5>;  // each up to four times the one before

  static constexpr std::size_t floor(std::size_t number) { return least_nbytes << (2 * number); }
  static constexpr std::size_t length(std::size_t nbytes) {
    std::size_t number = 0;
    while (number + 1 < std::tuple_size_v<Lengths> && nbytes >= floor(number + 1)) ++number;
    return number;
  }
  static Lengths all_lengths() { return {Alike(0), Alike(1), Alike(2), Alike(3), Alike(4)}; }

  std::array<Lengths, 2> alike_{all_lengths(), all_lengths()};
  RecentTimes* last_ = nullptr;  // where the time of the last message belongs
  std::uint32_t again_ns_ = 0;   // to write it again, if it was left
  bool decides_;
  bool left_last_ = false;
  bool combined_last_ = false;
};

}  // namespace unisono
