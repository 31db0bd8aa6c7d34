// `SingleCopyPolicy` decides whether a long message goes through slots or by a single copy.
//
// Theory of operation
// -------------------
// Through slots, a message is copied twice: the sender writes it to shared memory, and the receiver reads it. By single
// copy, the receiver has the kernel copy it once (`process_vm_readv`). That one copy is slower, because the kernel
// looks up every page.
//
// The policy compares two times for 64 KiB. The compared times depend on the number of ranks:
// - Two ranks that send and receive at once do both copies each. So the cost of slots is the time from the first to the
// last byte read, plus the time in which the sender wrote the first slots.
// - Among more ranks, the elapsed time depends on third ranks: all would change to single copy once one rank does. So
// the cost of slots is the time of the two copies alone.
// - The cost of single copy is the time of the kernel's copies. Afterwards both caches hold the message, and the next
// write to that memory waits as a write to a slot does that the reader holds. So the time to write it again is added.
//
// Both ways are tried again and again, as ways of storing are (store_policy.h). Each trial lasts several messages,
// because either way leaves the caches in another state. The choice is made for each class of length, because caches
// hold the shorter messages, and apart for messages that are combined as they are read. The median of the last three
// times counts: the blocks of a ring are in the caches only in its first round.
//
// Of two ranks that exchange messages, the dialling one decides, and the other one follows, because the time of either
// way depends on what the other rank does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "endpoint/channel.h"
#include "shm/store_policy.h"

namespace unisono {

class SingleCopyPolicy {
 public:
  //! Shorter messages always go through slots. Second-level caches would hold all of a shorter message on both sides,
  //! so the next stores there would take longer than the single copy has saved. Nothing measures that.
  static constexpr std::size_t least_nbytes = 2 << 20;
  //! Whether a message of `nbytes` may go by single copy; `incoming` is the kind of data that its sender receives while
  //! it sends.
  static constexpr bool is_eligible(std::size_t nbytes, Incoming incoming) {
    return incoming != Incoming::none && nbytes >= least_nbytes;
  }
  //! The cost of the last messages of one kind: nanoseconds for 64 KiB through slots, and by single copy; 0 if unknown.
  struct Cost {
    std::uint32_t by_slots;
    std::uint32_t by_single_copy;
  };
  //! The costs of messages that are kept as they are [0], and of those that are combined [1].
  using Costs = std::array<Cost, 2>;

  //! `decides`: whether this rank chooses the way. Otherwise it uses the way that the peer used last.
  explicit SingleCopyPolicy(bool decides) : decides_(decides) {}

  //! Returns whether the next message goes by single copy. `costs` are the latest times of both ways, the last message
  //! included.
  //! `rewrite_ns` is the time to write 64 KiB that the peer has read (0: unknown).
  bool use_single_copy(std::size_t nbytes, bool combined, const Costs& costs, std::uint32_t rewrite_ns);
  //! Takes in how the peer has sent such a message.
  void note_peer_choice(std::size_t nbytes, bool combined, bool single_copy) {
    if (!decides_) classes_[combined][length_class(nbytes)].peer_choice = single_copy;
  }

 private:
  // Messages of similar length and the same use.
  struct MessageClass {
    Choice choice{RecentTimes::kept};
    std::array<RecentTimes, 2> times;  // by slots, and by single copy
    std::optional<bool> peer_choice;   // since this rank's last message of the class
  };
  static std::size_t length_class(std::size_t nbytes);

  static constexpr std::size_t length_classes = 5;  // each holds lengths up to four times those of the one before
  std::array<std::array<MessageClass, length_classes>, 2> classes_;
  RecentTimes* last_times_ = nullptr;  // receives the time of the last message
  std::uint32_t rewrite_ns_ = 0;       // added to the last message's time if it went by single copy
  bool decides_;
  bool last_single_copy_ = false;
  bool last_combined_ = false;
};

}  // namespace unisono
