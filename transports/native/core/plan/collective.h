// `Collective` interprets the plan of one collective.
//
// Theory of operation
// -------------------
// A lane posts its instances (group, segment) in the canonical order: by group + segment, then by segment. An instance
// is posted once the one before it in this order is posted and its dependencies have ended. These are the same
// segment's previous group, the previous segment's same group, and the groups of other lanes that it names.
//
// A posted instance drives its messages until all have ended, which ends the group. Its local steps run once. If they
// write at most 32 KiB, they run while its messages are under way; otherwise when its messages have ended.
//
// Both ends of a channel post its messages in the same order. So a message begins only when all messages posted before
// it on its channel, in its direction, have ended. The receiver compares each header with the one that its plan
// expects. A received operand is reduced where it lies.
//
// A program of one lane and one segment is *straight*: its groups follow each other, and none of these conditions needs
// a check. Small calls are straight. Most of their cost is the interpreter's work between two messages.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "endpoint/operation.h"
#include "plan/mapped_memory.h"
#include "plan/program.h"
#include "recorder/flight_recorder.h"
#include "shm/store_policy.h"

namespace unisono {

//! The entry of one channel in the table of channels. For each direction, it also has the number of the pass in which a
//! message last had to wait.
struct ChannelEntry {
  // Null until the channel is open. The thread that adds the channel stores it, and the leader loads it.
  std::atomic<Channel*> channel{nullptr};
  std::int32_t peer = 0;  // constant once the entry exists
  // Used by the leader only.
  std::uint64_t send_blocked_in_pass = 0;
  std::uint64_t receive_blocked_in_pass = 0;
};

//! The traffic of one channel, and how long calls waited for its peer.
struct ChannelTraffic {
  std::int32_t peer;
  const char* transport;
  std::array<std::uint64_t, 5> counts;  // messages and bytes sent, messages and bytes received, nanoseconds waited
};

//! The channels of a communicator, by lane and peer. One thread may add channels while another one uses the table,
//! because entries never move.
class ChannelTable {
 public:
  static constexpr std::int64_t most_lanes = 64;
  //! Point-to-point messages use two channels of their own, one for each direction. The sending side opens them.
  static constexpr std::int64_t sending_lane = -1;
  static constexpr std::int64_t receiving_lane = -2;

  //! `size`: the number of ranks in the communicator.
  explicit ChannelTable(std::int32_t size) : size_(static_cast<std::size_t>(size)) {}
  //! Adds a channel. Throws std::invalid_argument if there can be no such channel or it exists already.
  void add(std::int64_t lane, std::unique_ptr<Channel> channel);
  //! The entry of a channel; throws std::invalid_argument if there can be no such channel.
  ChannelEntry& at(std::int64_t lane, std::int64_t peer) {
    const auto index = static_cast<std::size_t>(lane - receiving_lane);
    if (index < lanes_.size() && static_cast<std::size_t>(peer) < size_)
      if (Peers* peers = lanes_[index].load(std::memory_order_acquire)) return (*peers)[static_cast<std::size_t>(peer)];
    return make_entry(lane, peer);
  }
  //! See `Channel::accepts`; empty if the channel is not open.
  std::optional<bool> accepts(std::int64_t lane, std::int64_t peer, MemoryType memory, std::uint64_t nbytes);
  //! The traffic of every open channel.
  std::vector<ChannelTraffic> traffic() const;
  //! Calls `visit` with every open channel. Only the leader calls this function.
  void for_each(const std::function<void(Channel&)>& visit) const;
  //! See `Channel::release_memory`.
  [[nodiscard]] bool release_memory(std::chrono::steady_clock::time_point until);
  //! Closes all channels.
  void clear();
  //! Returns the number of a new pass over all messages, so that a channel that has been blocked in a pass is not tried
  //! again in it. Only the leader calls this function.
  std::uint64_t new_pass() { return ++passes_; }

 private:
  using Peers = std::vector<ChannelEntry>;
  ChannelEntry& make_entry(std::int64_t lane, std::int64_t peer);

  const std::size_t size_;
  // Guards the vectors that own channels, and every change of the table. `accepts` holds it too, so that no thread
  // closes the channel meanwhile.
  mutable std::mutex mutex_;
  // The entries of each lane; null before the first use of the lane. Threads read them without the mutex.
  std::array<std::atomic<Peers*>, most_lanes + 2> lanes_{};
  std::vector<std::unique_ptr<Peers>> owned_lanes_;
  std::vector<std::unique_ptr<Channel>> owned_channels_;
  std::uint64_t passes_ = 0;  // used by the leader only
};

//! How often a call has been run, and the time it took. Only the leader writes it; any thread may read it.
struct Usage {
  std::atomic<std::uint64_t> calls{0};
  // calls that were timed: reading the clock every time would slow down small calls
  std::atomic<std::uint64_t> timed{0};
  std::atomic<std::uint64_t> nanoseconds{0};
};

//! A call that can run any number of times, on different memory.
struct CompiledCall {
  Program program;
  std::uint64_t digest = 0;
  SharedDescription description;
  std::unique_ptr<Usage> usage = std::make_unique<Usage>();
};

//! The memory of a call: the addresses of the extents of INPUT and OUTPUT.
struct Memory {
  std::span<std::byte* const> input;
  std::span<std::byte* const> output;
};

//! A running collective.
class Collective final : public Operation {
 public:
  //! Starts `call` on `memory` as number `sequence` of its communicator. Input and output may be the same memory.
  //! The call, the arrays and the channels must stay alive until the call is done, but not the spans in `memory` that
  //! list the arrays. Then the object can be started again.
  void start(const CompiledCall& call, const Memory& memory, std::uint32_t sequence, ChannelTable& channels);

  //! Records the groups of all calls in `log`, as calls of `communicator`.
  void record_groups(GroupLog* log, std::uint64_t communicator) {
    groups_ = log;
    communicator_ = communicator;
  }

  bool advance() override;
  bool done() const override { return instances_left_ == 0; }
  void blocked_on(std::vector<Blocked>& waits) const override;
  //! To be called once when a call is done.
  void ended() {
    if (timed_) note_time();
  }
  //! Makes sure that SCRATCH of a failed call is never freed, because a library may still use it.
  void leak_scratch() {
    static_cast<void>(scratch_.release());
    scratch_nbytes_ = 0;
  }

 private:
  // The state of a message: `piece` pieces, `done` elements and `partial` bytes have been moved.
  struct Message {
    Message(const Action& of, ChannelEntry& on) : action(&of), entry(&on) {}

    const Action* action;
    ChannelEntry* entry;
    std::size_t piece = 0;
    std::int64_t done = 0;
    std::size_t partial = 0;
    bool begun = false;
    bool ended = false;
    std::array<std::byte, 16> carry;  // an element of which only a part has arrived
  };
  struct Instance {
    std::int64_t group;
    std::int64_t segment;
    std::size_t lane;
    std::int64_t begun_ns;  // if groups are recorded
    const Work* work;
    Work room;
    std::vector<Message> messages;
    std::size_t messages_left;  // messages that have not ended
    bool local_pending;         // whether its local steps have yet to run
  };
  struct LaneRun {
    std::int64_t groups = 0;
    std::int64_t wave = 0;                   // group + segment of the next instance to post
    std::int64_t next_segment = 0;           // segment of the next instance to post
    std::vector<std::int64_t> groups_ended;  // by segment
    std::vector<std::unique_ptr<Instance>> active;
  };

  void count();
  void note_time();
  void bind(const Memory& memory);
  bool advance_straight();
  bool advance_lanes();
  void begin(Instance& instance, std::size_t lane);
  bool post(std::size_t lane);
  bool may_post(std::size_t lane) const;
  bool dependencies_ended(std::size_t lane, std::int64_t group, std::size_t segment) const;
  void move_to_next(LaneRun& run) const;
  std::unique_ptr<Instance> take_instance();
  void run_local_steps(const Work& work);
  void run_local(const Work& work, const Action& action);
  bool drive(LaneRun& run);
  bool drive(Instance& instance);
  static void add_blocked(const Instance& instance, std::vector<Blocked>& waits);
  void retire(LaneRun& run);
  void end(LaneRun& run, std::unique_ptr<Instance> instance);
  void end_instance(const Instance& instance);
  bool drive_message(const Instance& instance, Message& message);
  bool drive_send(const Instance& instance, Message& message, Channel& channel);
  bool drive_signal(const Instance& instance, Message& message, Channel& channel);
  bool drive_receive(const Instance& instance, Message& message, Channel& channel);
  bool receive_flag(Message& message, Channel& channel);
  bool receive_plain(const Work& work, Message& message, Channel& channel);
  bool receive_reducing(const Work& work, Message& message, Channel& channel);
  void combine_received(const Work& work, Message& message, const std::byte* received, std::int64_t count);
  Whole whole_of(const Work& work, const Action& action) const;
  Header header_of(const Instance& instance, const Action& action) const;
  std::byte* at(const Place& place) const { return bases_[place.base] + place.offset; }

  GroupLog* groups_ = nullptr;
  std::uint64_t communicator_ = 0;
  bool timed_ = false;
  std::chrono::steady_clock::time_point began_;
  const CompiledCall* call_ = nullptr;
  ChannelTable* channels_ = nullptr;
  std::uint32_t sequence_ = 0;
  std::int64_t instances_left_ = 0;  // instances that have not ended
  std::vector<std::byte*> bases_;    // of the program
  MappedMemory mapped_;              // of a plan that reads peers' memory
  bool loaded_ = false;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_nbytes_ = 0;
  // Of a straight program: the group that is next or under way.
  bool straight_ = false;
  bool group_begun_ = false;
  Instance straight_group_{};
  // Of any other program.
  std::vector<LaneRun> lanes_;
  std::vector<std::unique_ptr<Instance>> spare_;
  std::vector<const std::byte*> sources_;  // sources of a local step
  StorePolicy copies_;
  std::uint64_t pass_ = 0;
};

}  // namespace unisono
