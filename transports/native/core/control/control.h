// `Control`: failure detection and errors of a process. One service thread, which never takes the interpreter's lock,
// serves the control links of this rank.
//
// Theory of operation
// -------------------
// Judges. The two lowest ranks that have not departed are the judges of the job: the hub, and its stand-in. Every rank
// has a link to both. When a judge departs, the next rank takes its place, and the others dial it (session.py, which
// `add_doorbell` wakes).
//
// Deaths. A link that ends without a farewell means that its rank has died. On one host a pidfd reports that too. A
// link between hosts may also be reset while both ranks live. It is then continued over another connection, like a
// channel (tcp/resumption.py). If that is refused, or takes too long, the rank has died.
//
// Failures. A rank sends the first failure that it finds to both judges. Each judge passes it on to every rank, so one
// stopped judge delays no error. Every rank then wakes its waiting calls, which raise the failure, and refuses later
// calls.
//
// Blocked calls. Judges also find out why a call does not end: see judge.h. Calls that do not wait long cause no
// frames.
//
// Departures. A rank may send its last message over a new channel, and leave before the other rank has added the
// channel. So its farewell says how many channels it had with each rank. Until a rank has added as many, it waits for
// the rest.
//
// Suspicion. A rank whose channel to a peer has ended suspects the peer. Usually a judge reports the reason a moment
// later: a failure, a departure or a death. If not, only the connection may have broken. The rank then trusts the peer
// again when the channel goes on over another connection (tcp/resumption.py). If that takes too long, the loss of the
// peer is the failure. The suspicion also ends when the rank itself closes the communicator. If no call needs the peer,
// such as a judge that refuses a link, its departure ends the suspicion too, and is no failure.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
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

#include "control/failure.h"
#include "control/frame.h"
#include "control/judge.h"
#include "endpoint/channel.h"
#include "recorder/flight_recorder.h"
#include "system/descriptor.h"
#include "system/doorbell.h"
#include "tcp/connection.h"
#include "tcp/tcp_stream.h"

namespace unisono {

//! How far the clock of rank 0 is ahead of this rank's, and by how much that may be wrong, in nanoseconds.
struct ClockOffset {
  std::int64_t offset_ns = 0;
  std::int64_t uncertainty_ns = 0;
};

//! A stream of a TCP channel that has lost its connection. `peer` is a rank of the job.
struct LostConnection {
  std::uint64_t communicator;
  std::int64_t lane;
  std::int32_t peer;
  BrokenStream stream;
};

//! This value of `communicator`, in a `LostConnection` or a suspicion, means a control link instead of a communicator.
inline constexpr std::uint64_t control_links = ~std::uint64_t{0};

//! The control links of one rank.
class Control {
 public:
  using Clock = std::chrono::steady_clock;

  //! Starts the service thread. `recorded`: the number of calls that the flight recorder keeps for readers.
  //! `slow_after`: the time after which a call counts as slow. `lost_after`: the time of silence after which a rank on
  //! another host counts as lost.
  Control(std::int32_t rank, std::int32_t size, std::size_t recorded = 0,
          Clock::duration slow_after = std::chrono::hours(1'000'000),
          Clock::duration lost_after = std::chrono::seconds(3));
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  //! This rank in the job.
  std::int32_t rank() const { return rank_; }
  //! The number of ranks in the job.
  std::int32_t size() const { return size_; }
  //! The flight recorder of this process.
  FlightRecorder& recorder() { return recorder_; }

  //! The time after which a rank reports a call that has not ended.
  Clock::duration slow_after() const { return slow_after_; }
  //! The time after which a silent connection is dialled again (silence.h).
  Clock::duration silent_after() const;
  //! How often to look for silent connections.
  Clock::duration look_period() const;
  //! Adds a notice for the log of the program and rings the doorbells. `important`: no other rank reports the event, so
  //! the log shows it by default.
  void notify(std::string text, bool important);
  //! Removes and returns the notices, with whether each is important.
  std::vector<std::pair<std::string, bool>> take_notices();

  //! Takes over an authenticated connection to the control of `peer`, and a pidfd of its process or -1. This rank or
  //! the peer is a judge.
  void add_link(std::int32_t peer, Connection connection, Descriptor process);
  //! Ends the use of the connection of the link to a peer, as `Channel::retire` does for a stream.
  std::optional<StreamState> retire_link(std::int32_t peer, std::uint32_t resumptions);
  //! Continues the link to a peer over another connection, as `Channel::resume` does a stream.
  bool resume_link(std::int32_t peer, Connection connection, const StreamState& state);
  //! Reports that a link which has been reset cannot be continued.
  void end_link(std::int32_t peer);
  //! The number of open links.
  std::size_t links() const;
  //! The hub and its stand-in, or fewer if fewer ranks remain.
  std::vector<std::int32_t> judges() const;

  //! Whether the job has failed.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  //! The failure, once `failed()` is true.
  Failure failure() const;
  //! Reports a failure. Only the first one counts, and every rank learns of it.
  void fail(Failure failure);
  //! Reports that a peer seems to be lost, for `reason`, in a call of `communicator`; `control_links` stands for no
  //! call. The job fails within half a second, unless the suspicion ends before. The text of the failure is the reason
  //! that a judge reports for the end of the peer, or else `reason`. If the peer is not `needed`, the job does not fail
  //! when the peer has left.
  void suspect(std::int32_t peer, std::uint64_t communicator, std::int64_t sequence, const std::string& reason,
               bool needed = true);
  //! Ends the suspicion of a peer, whose channel goes on.
  void trust(std::int32_t peer);
  //! Reports that this rank is about to continue a channel to the peer over another connection. If the rank suspects
  //! the peer, it waits as long as that may take before the suspicion becomes a failure.
  void expect_resumption(std::int32_t peer);
  //! Reports that the channel cannot go on.
  void give_up_resumption(std::int32_t peer);
  //! Ends all suspicions of lost peers that calls of a closed communicator have reported, because these calls need no
  //! peer any more.
  void forget_suspicions(std::uint64_t communicator);
  //! Reports connections to open anew, and rings the doorbells.
  void lost_connections(const std::vector<LostConnection>& lost);
  //! Removes and returns the reported connections.
  std::vector<LostConnection> take_lost_connections();
  //! Like `suspect`, and waits for the failure.
  void lose(std::int32_t peer, std::int64_t sequence, const std::string& reason);

  //! Asks the hub about a call without progress: see judge.h. `members` are the ranks of the communicator; empty for
  //! all.
  void report_blocked(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence);
  //! Reports to the judges that a message of another call has arrived. If all ranks made the same call, the job fails
  //! with the error `text`.
  void report_mismatch(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence,
                       const std::string& text);
  //! Reports that a call will time out at `deadline`, or, for sequence -1, message `number` to or from `waits_for`.
  void report_late(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence,
                   std::int64_t number, std::int32_t waits_for, Clock::time_point deadline);
  //! Returns the latest outlook that the judges have sent on a late call, and keeps it. If they have sent none, the
  //! outlook says that the judges do not answer.
  Outlook outlook(std::uint64_t communicator, std::int64_t sequence, std::int64_t number);
  //! Waits until every other rank has made the last collective that this rank made on the communicator, or has
  //! departed. Ends early if the job fails, and at the latest after `limit`. Calls `interrupted` now and then.
  void settle(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::chrono::milliseconds limit,
              bool (*interrupted)());

  //! Measures the offset of rank 0's clock, which is CLOCK_MONOTONIC of its host, and waits for the result until
  //! `limit` has passed. If rank 0 has departed or does not answer, the result is the last one; empty if there is none.
  //!
  //! This rank asks rank 0 for the time, again and again. Rank 0 has read its clock between the question and the
  //! answer, so its time belongs to the middle of the two, give or take a half of the round trip. The shortest round
  //! trip counts (F. Cristian, Probabilistic clock synchronization, 1989).
  std::optional<ClockOffset> measure_clock(std::chrono::milliseconds limit);

  //! Calls `add`, which adds a channel with `peer` to an endpoint, and counts the channel. This rank announces the
  //! counts in its farewell, so that other ranks know how many channels to wait for.
  void add_channel(std::int32_t peer, const std::function<void()>& add);
  //! Whether a rank has departed.
  bool departed(std::int32_t peer) const;
  //! Whether `peer` has departed, and every channel that it had with this rank has been added here. So no message of it
  //! can arrive over a channel that this rank does not have.
  bool opens_no_more(std::int32_t peer) const;
  //! The text of the rank's farewell; empty if it gave none.
  std::string farewell(std::int32_t peer) const;

  //! Adds a doorbell to ring at a failure or a departure.
  void add_doorbell(int doorbell);
  //! Removes a doorbell.
  void remove_doorbell(int doorbell);

  //! Sends a farewell to all ranks and ends the service. Repeated calls do nothing.
  void leave(const std::string& farewell);
  //! Stops the use of this object in a forked child, and reports no error. All its links are closed there already (see
  //! descriptor.h). The child must not use the object any more. Nor may the child take the mutex of this object or of
  //! an endpoint, because a thread of the parent may have held it during the fork.
  void abandon();
  //! Whether this is a forked child.
  bool abandoned() const { return abandoned_; }

  //! The number of frames sent, for tests.
  std::uint64_t frames_sent() const { return frames_sent_.load(std::memory_order_relaxed); }

 private:
  struct Link {
    std::optional<TcpStream> stream;  // while the link is open
    Descriptor process;
    bool crosses_hosts = false;
    std::string in;
    std::optional<Clock::time_point> ends_at{};  // of a link that has been reset, unless it is continued before
  };
  struct Suspicion {
    std::int32_t peer;
    std::uint64_t communicator;
    std::int64_t sequence;
    std::string reason;
    Clock::time_point until;
    bool needed;
  };
  using LateCall = std::tuple<std::uint64_t, std::int64_t, std::int64_t>;  // communicator, sequence, number
  struct JudgedOutlook {
    Outlook outlook;
    std::int32_t judge;
    Clock::time_point time;
  };

  struct ClockQuestions {
    int remaining = 0;
    std::int64_t asked_ns = 0;  // when the latest one was sent
    std::optional<ClockOffset> best;
  };

  // All functions below are called with the mutex held.
  void serve(std::unique_lock<std::mutex>& lock);
  void poll_links(std::unique_lock<std::mutex>& lock);
  int poll_timeout_ms() const;
  void read_link(std::int32_t peer);
  bool take_bytes(std::int32_t peer, std::string_view bytes);
  void write_link(std::int32_t peer);
  bool may_go_on(const Link& link) const;
  void link_ended(std::int32_t peer);
  enum class Loss : std::uint8_t { died, out_of_reach };
  void lose_link(std::int32_t peer, Loss loss = Loss::died);
  void lose_late_links(Clock::time_point now);
  void look_at_links(Clock::time_point now);
  Clock::duration resumption_time() const;
  void check_ranks(const Frame& frame) const;
  void handle(std::int32_t from, const Frame& frame);
  void send(std::int32_t peer, const Frame& frame);
  void deliver(std::int32_t peer, const Frame& frame);
  void send_past_events(std::int32_t peer);
  Frame farewell_frame(std::int32_t departed, std::int32_t reader) const;
  Frame failure_frame() const;
  void send_to_others(std::int32_t except, const Frame& frame);
  Frame report_frame(FrameType type, std::uint64_t communicator, const std::vector<std::int32_t>& members,
                     std::int64_t sequence) const;
  void report_to(std::size_t most_judges, const Frame& report);
  void set_failure(Failure failure, std::int32_t informant);
  void note_departure(std::int32_t informant, const Frame& farewell);
  void note_channels(std::int32_t peer, const Frame& farewell);
  void note_outlook(std::int32_t from, const Frame& frame);
  void ask_clock();
  void note_time(const Frame& frame);
  void resolve_suspicions(Clock::time_point now);
  std::optional<Failure> failure_of(const Suspicion& suspicion, Clock::time_point now) const;
  std::int32_t first_departure_with_reason() const;
  void judge(Clock::time_point now);
  void ring_all();
  Frame answer_query(const Frame& query) const;
  std::vector<std::int32_t> current_judges() const;
  bool is_hub() const;

  const std::int32_t rank_;
  const std::int32_t size_;
  FlightRecorder recorder_;
  const Clock::duration slow_after_;
  const Clock::duration lost_after_;
  // Filled by any thread, with the mutex, and emptied by `take_notices` and `take_lost_connections`.
  std::vector<std::pair<std::string, bool>> notices_;
  std::vector<LostConnection> lost_connections_;
  // Guards every other member that is neither constant nor atomic. The service thread holds it except while it polls.
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a failure, a communicator that has settled, or a clock that has been measured
  std::vector<Link> links_;          // by peer
  std::vector<std::optional<Clock::time_point>> departures_;
  std::vector<std::string> farewells_;
  // How many channels a rank had with each other rank, or -1: its own so far, and those of departed ranks.
  std::vector<std::vector<std::int32_t>> channels_;
  std::vector<int> doorbells_;  // of threads that sleep; the thread that sets the failure rings them
  Judge judge_;
  std::vector<Suspicion> suspicions_;
  std::map<std::int32_t, Clock::time_point> resuming_;  // by peer, until when a channel to it may take to go on
  std::map<LateCall, JudgedOutlook> outlooks_;
  std::set<std::pair<std::uint64_t, std::int64_t>> settling_;  // communicator and sequence
  ClockQuestions clock_;
  Clock::time_point looked_at_{};                           // when the links were last examined for silence
  Clock::time_point next_look_ = Clock::time_point::max();  // unset without a link to another host
  Failure failure_;
  // Set after `failure_`, with the mutex. Waiting threads look at it all the time, without the mutex.
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> frames_sent_{0};
  // The service thread sleeps on it. A caller that has changed something for it to do rings it.
  Doorbell wake_;
  bool stopping_ = false;   // set by `leave`; the service thread then says farewell and ends
  bool abandoned_ = false;  // set in a forked child, which has one thread, so it needs no mutex
  std::thread service_;
};

}  // namespace unisono
