// The plan interpreter.
//
// Theory of operation. A lane posts its instances (group, segment) in canonical order: by (group + segment, segment).
// An instance is posted when the one before it in that order has been, and when its dependencies have ended: the same
// segment's previous group, the previous segment's same group, and the groups of other lanes that it names. Its
// messages are driven until they end, when the group ends. Its local steps are run once what it sends is on its way,
// and long ones when all its messages have ended.
//
// Both ends of a channel post its messages in the same order, so a message may begin only when all those posted before
// it on its channel, in its direction, have ended; its header is checked against what the plan expects. Received
// operands are reduced where they lie.
//
// A program of one lane and one segment is *straight*: of its groups, one follows the other, and none of the above
// needs to be asked. Small calls are such programs, and what they cost is what the interpreter does between their
// messages.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mapped_memory.h"
#include "operation.h"
#include "program.h"
#include "store_policy.h"

namespace unisono {

// A place for a channel and, for each direction, the number of the last pass in which a message had to wait on it.
struct ChannelEntry {
  std::atomic<Channel*> channel{nullptr};  // nothing as long as it has not been opened
  std::int32_t peer = 0;
  std::uint64_t send_blocked_in_pass = 0;
  std::uint64_t receive_blocked_in_pass = 0;
};

struct ChannelTraffic {
  std::int32_t peer;
  const char* transport;
  std::array<std::uint64_t, 4> counts;  // messages and bytes sent, messages and bytes received
};

// The channels of a communicator, by lane and peer. One thread may add channels while another one uses the table: what
// has been added stays where it is.
class ChannelTable {
 public:
  static constexpr std::int64_t most_lanes = 64;
  // Point-to-point messages have channels of their own, one for each direction, which the sending side opens.
  static constexpr std::int64_t sending_lane = -1;
  static constexpr std::int64_t receiving_lane = -2;

  explicit ChannelTable(std::int32_t size) : size_(static_cast<std::size_t>(size)) {}
  // Throws std::invalid_argument if there can be no such channel or there is one.
  void add(std::int64_t lane, std::unique_ptr<Channel> channel);
  // The place of a channel; throws std::invalid_argument if there can be none.
  ChannelEntry& at(std::int64_t lane, std::int64_t peer) {
    const auto index = static_cast<std::size_t>(lane - receiving_lane);
    if (index < lanes_.size() && static_cast<std::size_t>(peer) < size_)
      if (Peers* peers = lanes_[index].load(std::memory_order_acquire)) return (*peers)[static_cast<std::size_t>(peer)];
    return make_place(lane, peer);
  }
  // See `Channel::takes`; nothing if the channel has not been opened.
  std::optional<bool> takes(std::int64_t lane, std::int64_t peer, MemoryType memory, std::uint64_t nbytes);
  std::vector<ChannelTraffic> traffic() const;
  // See `Channel::let_go`.
  [[nodiscard]] bool let_go(std::chrono::steady_clock::time_point until);
  void clear();
  // The number of a pass over the messages, never given before; for the thread that makes progress.
  std::uint64_t new_pass() { return ++passes_; }

 private:
  using Peers = std::vector<ChannelEntry>;
  ChannelEntry& make_place(std::int64_t lane, std::int64_t peer);

  const std::size_t size_;
  mutable std::mutex mutex_;
  std::array<std::atomic<Peers*>, most_lanes + 2> lanes_{};
  std::vector<std::unique_ptr<Peers>> owned_lanes_;
  std::vector<std::unique_ptr<Channel>> owned_channels_;
  std::uint64_t passes_ = 0;
};

// How often a call has been run, and what it took. Written by the thread that leads the endpoint, read by any.
struct Usage {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> timed{0};  // of these: reading the clock every time would slow small calls down
  std::atomic<std::uint64_t> nanoseconds{0};
};

// A call that can be run any number of times on different memory.
struct CompiledCall {
  Program program;
  std::uint64_t digest = 0;
  std::shared_ptr<const std::string> description;
  std::unique_ptr<Usage> usage = std::make_unique<Usage>();
};

// The memory of a call: the addresses of the extents of INPUT and OUTPUT.
struct Memory {
  std::span<std::byte* const> input;
  std::span<std::byte* const> output;
};

class Collective final : public Operation {
 public:
  // Starts `call` on the given memory as the `sequence`-th of its communicator. Input and output may be the same.
  // Everything but the spans must stay alive until it is done. An object can be started again after that.
  void start(const CompiledCall& call, const Memory& memory, std::uint32_t sequence, ChannelTable& channels);

  bool advance() override;
  bool done() const override { return left_ == 0; }
  void blocked_on(std::vector<Blocked>& found) const override;
  // To be called once when a call is done.
  void ended() {
    if (timed_) note_time();
  }
  // Never frees SCRATCH of a call that has failed, which a library may still use.
  void forsake_scratch() {
    static_cast<void>(scratch_.release());
    scratch_nbytes_ = 0;
  }

 private:
  // A message on its way. What has been moved of it are `piece` pieces, `done` elements and `partial` bytes.
  struct Message {
    Message(const Action& of, ChannelEntry& on) : action(&of), entry(&on) {}

    const Action* action;
    ChannelEntry* entry;
    std::size_t piece = 0;
    std::int64_t done = 0;
    std::size_t partial = 0;
    bool begun = false;
    bool ended = false;
    std::array<std::byte, 16> carry;  // of an element that has arrived in part
  };
  struct Instance {
    std::int64_t group;
    std::int64_t segment;
    const Work* work;
    Work room;
    std::vector<Message> messages;
    std::size_t left;  // messages
    bool local_left;   // whether its local steps are yet to be run
  };
  struct LaneRun {
    std::int64_t groups = 0;
    std::int64_t wave = 0;                   // group + segment of the next instance to post
    std::int64_t next_segment = 0;           // its segment
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
  static void add_blocked(const Instance& instance, std::vector<Blocked>& found);
  void retire(LaneRun& run);
  void end(LaneRun& run, std::unique_ptr<Instance> instance);
  void end_instance();
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

  bool timed_ = false;
  std::chrono::steady_clock::time_point began_;
  const CompiledCall* call_ = nullptr;
  ChannelTable* channels_ = nullptr;
  std::uint32_t sequence_ = 0;
  std::int64_t left_ = 0;          // instances that have not ended
  std::vector<std::byte*> bases_;  // of the program
  MappedMemory mapped_;            // of a plan that maps
  bool loaded_ = false;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_nbytes_ = 0;
  // Of a straight program: the group that is next, or under way.
  bool straight_ = false;
  bool under_way_ = false;
  Instance straight_group_{};
  // Of any other.
  std::vector<LaneRun> lanes_;
  std::vector<std::unique_ptr<Instance>> spare_;
  std::vector<const std::byte*> sources_;  // of a local step
  StorePolicy copies_;
  std::uint64_t pass_ = 0;
};

}  // namespace unisono
