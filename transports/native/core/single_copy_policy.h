// Whether long messages go through slots or are left where they lie, for the reader to have the kernel copy them.
//
// Theory of operation. Slots cost two copies, one on either side; what is left costs one, on the reader's side, which
// is slower, as the kernel looks up every page. Where both sides send and receive at the same time, each of them does
// both copies: so what a reader takes from the first byte to the last, while it writes to slots itself, together with
// what had been written before, stands against what copying by the kernel takes. That is so where there are two ranks.
// Among more, a message takes as long as a third rank lets it, and all of them would leave theirs once one does: there
// it is the two copies alone that count. Both ways are tried again and again, as ways of storing are (store_policy.h),
// but several times in a row, as each leaves other things behind in the caches; and apart for each length, as caches
// hold the shorter ones, and for what is combined as it is read. Of two ranks that exchange messages, one decides and
// the other does as it has seen: what either way takes depends on what the other rank does. What caches hold of a
// message that was left they hold on both sides, and whoever writes there next waits as for slots that the reader
// holds: so that is added, though it is not the message that takes it. Of the last few times the one in the middle
// counts, as the blocks of a ring, say, are in the caches in its first round only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "channel.h"
#include "store_policy.h"

namespace unisono {

class SingleCopyPolicy {
 public:
  // What is shorter always goes through slots: second-level caches would hold all of it on both sides, so that the next
  // stores there take longer than the message has saved, which nobody measures.
  static constexpr std::size_t least_nbytes = 2 << 20;
  static constexpr bool may_leave(std::size_t nbytes, Receipt receipt) {
    return receipt != Receipt::none && nbytes >= least_nbytes;
  }
  // What the last message has taken that was combined, or was not: nanoseconds for each 64 KiB; 0 if it is not known.
  struct Took {
    std::uint32_t by_slots;
    std::uint32_t left;
  };
  using Times = std::array<Took, 2>;

  explicit SingleCopyPolicy(bool decides) : decides_(decides) {}

  // Whether the next message, which may be left, is. What the one before has taken is known by now; `again_ns` is what
  // it takes to write memory that the peer has read (0: it is not known).
  bool leaves(std::size_t nbytes, bool combined, const Times& took, std::uint32_t again_ns);
  // The peer has sent such a message.
  void see(std::size_t nbytes, bool combined, bool left) {
    if (!decides_) alike_[combined][length(nbytes)].seen = left;
  }

 private:
  struct Alike {
    Choice choice{RecentTimes::kept};
    std::array<RecentTimes, 2> times;  // of slots, and of what was left
    std::optional<bool> seen;          // whether the peer has left one, since this rank has sent one
  };
  static std::size_t length(std::size_t nbytes);

  static constexpr std::size_t lengths = 5;  // each up to four times the one before
  std::array<std::array<Alike, lengths>, 2> alike_;
  RecentTimes* last_ = nullptr;  // where the time of the last message belongs
  std::uint32_t again_ns_ = 0;   // to write it again, if it was left
  bool decides_;
  bool left_last_ = false;
  bool combined_last_ = false;
};

}  // namespace unisono
