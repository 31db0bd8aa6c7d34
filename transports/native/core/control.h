// Liveness and errors. One service thread per process, which never takes the interpreter's lock, serves the control
// links of this rank.
//
// Theory of operation. The two lowest ranks that have not left are the judges of the job: the hub, and the rank that
// stands in for it. Every rank has a link to both; when one of them leaves, the next rank takes its place and the
// others dial it (session.py, which `add_doorbell` wakes). A link that ends without a farewell means that its rank has
// died; on one host a pidfd says so too. The first failure that a rank finds goes to both judges, and each passes it on
// to every rank, so that one stopped judge holds nothing up. Every rank then wakes its waiting calls, which raise the
// failure, and refuses later ones. Judges also find out why calls do not go on: see judge.h. No frame is sent for calls
// that do.
//
// A rank whose channel to a peer has ended suspects the peer. Usually a judge knows the reason a moment later: a
// failure, a farewell, a death. If it does not, the loss of the peer is the failure.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "descriptor.h"
#include "doorbell.h"
#include "failure.h"
#include "flight_recorder.h"
#include "frame.h"
#include "judge.h"

namespace unisono {

class Control {
 public:
  using Clock = std::chrono::steady_clock;

  Control(std::int32_t rank, std::int32_t size);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  std::int32_t rank() const { return rank_; }
  std::int32_t size() const { return size_; }
  Recorder& recorder() { return recorder_; }

  // Takes over an authenticated socket to the control of `peer`, and a pidfd of it or -1. One of the two is a judge.
  void add_link(std::int32_t peer, Descriptor socket, Descriptor process);
  std::size_t links() const;
  // The hub and its stand-in: the two lowest ranks that have not left. Fewer if fewer remain.
  std::vector<std::int32_t> judges() const;

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  // Reports a failure; the first one stays, and every rank learns of it.
  void fail(Failure failure);
  // Reports that a peer seems to be lost, because of what was `seen`. The failure follows within half a second: the
  // reason for which the peer has left or failed, or else what was seen.
  void suspect(std::int32_t peer, std::int64_t sequence, const std::string& seen);
  // The same, and waits for the failure.
  void lose(std::int32_t peer, std::int64_t sequence, const std::string& seen);

  // Asks the judges about a call: see judge.h. `members` are the ranks of the communicator; none stands for all.
  void report_blocked(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence);
  void report_mismatch(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence,
                       const std::string& text);
  // A call, or for sequence -1 a message to or from `waits_for`, will time out at `deadline`. `number` is its own.
  void report_late(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence,
                   std::int64_t number, std::int32_t waits_for, Clock::time_point deadline);
  // What the judges have said of a late call so far; without a word from them, that they are silent.
  Outlook outlook(std::uint64_t communicator, std::int64_t sequence, std::int64_t number);
  // Waits until every other rank has made the last collective that this rank has made on the communicator, or has left,
  // or the job has failed, but no longer than `limit`. `interrupted` is asked now and then.
  void settle(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::chrono::milliseconds limit,
              bool (*interrupted)());

  bool departed(std::int32_t peer) const;
  // Whether it had left at that time.
  bool departed_by(std::int32_t peer, Clock::time_point time) const;
  // What the peer said when it left, or empty.
  std::string farewell(std::int32_t peer) const;

  // Doorbells that are rung when a failure or a departure becomes known.
  void add_doorbell(int doorbell);
  void remove_doorbell(int doorbell);

  // Says farewell to all and ends the service. May be called more than once.
  void leave(const std::string& farewell);
  // In a forked child, where all links are closed already (see descriptor.h): ends everything without a word. The
  // object must not be used after that, nor may its mutex or that of an endpoint be taken, which the parent's threads
  // may have held when the process was copied.
  void abandon();
  bool abandoned() const { return abandoned_; }

  std::uint64_t frames_sent() const { return frames_sent_.load(std::memory_order_relaxed); }

 private:
  struct Link {
    Descriptor socket;
    Descriptor process;
    std::string in;
    std::string out;
    bool open = false;
  };
  struct Suspicion {
    std::int32_t peer;
    std::int64_t sequence;
    std::string seen;
    Clock::time_point until;
  };
  using LateCall = std::tuple<std::uint64_t, std::int64_t, std::int64_t>;  // communicator, sequence, number
  struct JudgedOutlook {
    Outlook outlook;
    std::int32_t judge;
    Clock::time_point time;
  };

  // All below are called with the mutex held.
  void serve(std::unique_lock<std::mutex>& lock);
  void poll_links(std::unique_lock<std::mutex>& lock);
  int poll_timeout_ms() const;
  void read_link(std::int32_t peer);
  bool take_bytes(std::int32_t peer, std::string_view bytes);
  void write_link(std::int32_t peer);
  void link_ended(std::int32_t peer, int error = 0);
  void handle(std::int32_t from, const Frame& frame);
  void send(std::int32_t peer, const Frame& frame);
  void deliver(std::int32_t peer, const Frame& frame);
  void tell_the_past(std::int32_t peer);
  Frame farewell_frame(std::int32_t peer) const;
  Frame failure_frame() const;
  void send_to_others(std::int32_t except, const Frame& frame);
  Frame report_frame(FrameType type, std::uint64_t communicator, const std::vector<std::int32_t>& members,
                     std::int64_t sequence) const;
  void report_to(std::size_t most_judges, const Frame& report);
  void set_failure(Failure failure, std::int32_t informant);
  void note_departure(std::int32_t peer, std::int32_t informant, const std::string& farewell);
  void note_outlook(std::int32_t from, const Frame& frame);
  void resolve_suspicions(Clock::time_point now);
  std::optional<Failure> failure_of(const Suspicion& suspicion, Clock::time_point now) const;
  std::int32_t first_to_leave_with_words() const;
  void judge(Clock::time_point now);
  void ring_all();
  Frame testify(const Frame& query) const;
  std::vector<std::int32_t> current_judges() const;
  bool is_hub() const;

  const std::int32_t rank_;
  const std::int32_t size_;
  Recorder recorder_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a failure, or a communicator that has settled
  std::vector<Link> links_;          // by peer
  std::vector<std::optional<Clock::time_point>> departures_;
  std::vector<std::string> farewells_;
  std::vector<int> doorbells_;
  Judge judge_;
  std::vector<Suspicion> suspicions_;
  std::map<LateCall, JudgedOutlook> outlooks_;
  std::set<std::pair<std::uint64_t, std::int64_t>> settling_;  // communicator and sequence
  Failure failure_;
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> frames_sent_{0};
  Doorbell wake_;
  bool stopping_ = false;
  bool abandoned_ = false;
  std::thread service_;
};

}  // namespace unisono
