// `Endpoint`: one rank of one communicator. It holds the channels, starts the calls in order, and waits for them.
//
// Theory of operation
// -------------------
// Leader and followers. Any thread may start a call. One thread at a time, the leader, drives all calls of the
// endpoint. A thread that waits for its call becomes the leader if there is none. Otherwise it is a follower and sleeps
// until its call has ended or the leader steps down.
//
// Background calls. The endpoint's own thread, the server, drives calls that run in the background. It starts with the
// first of them. It steps down whenever another thread waits for a call of its own.
//
// Order. Collectives run one after the other, in the order in which they were started. Point-to-point messages all run
// at once. A small call is driven at once, without the queue, if there is no leader and no call before it.
//
// Waiting. A leader polls for progress: first it spins, then it yields its core between two looks, and at last it
// sleeps until its doorbell rings or a socket is ready. With a core for each rank it spins for some tens of
// microseconds. If other threads want its core, it yields at once. With more ranks than cores, it looks only at the
// cache lines where a message would arrive.
//
// The server hardly spins, because the program computes on its core. It spins once the program waits for its call. When
// a message arrives, the kernel runs the server at once. A thread of the program that has just computed would first
// wait for its next time slice. So a thread that waits for a background call drives that call only while the thread
// spins; then the server drives it.
//
// Checks. A waiting leader reads the failure flag at every look. Now and then it reads the clock and looks for closed
// links. Every waiting thread checks for signals.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/control.h"
#include "endpoint/leadership.h"
#include "endpoint/point_to_point.h"
#include "plan/collective.h"
#include "system/core_demand.h"
#include "system/doorbell.h"

namespace unisono {

//! Returns whether the program wants the wait to end (Ctrl-C). The waiting thread calls it from time to time, when it
//! is not the leader.
using Interrupted = bool (*)();

//! The state of a started call.
enum class Outcome : std::uint8_t { pending, done, failed, interrupted };

class Endpoint;

//! A point-to-point operation and its peer.
struct Message {
  std::optional<std::int32_t> peer;  // empty: any rank
  Posting posting;

  //! A send of `nbytes` at `data` to `peer`. `shape` is the `shape_code` of the array. `number`: see
  //! `Endpoint::number_of_synchronous`; 0 for an ordinary send.
  static Message to_send(std::int32_t peer, ElementType type, std::uint32_t tag, std::byte* data, std::size_t nbytes,
                         MemoryType memory = MemoryType::host, std::uint64_t shape = 0, std::uint32_t number = 0);
  //! A receive into `data`. Without `peer` it matches any other rank, and without `tag` any tag that is not reserved.
  //! `up_to`: see `Posting`.
  static Message to_receive(std::optional<std::int32_t> peer, ElementType type, std::optional<std::uint32_t> tag,
                            std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host,
                            std::uint64_t shape = 0, bool up_to = false);
  //! A probe, which ends when a matching message has arrived. With `once` it ends at once, even without a message.
  //! With `takes` it receives the message, whatever its type and length (`Verb`).
  static Message to_probe(std::optional<std::int32_t> peer, std::optional<std::uint32_t> tag, bool once,
                          bool takes = false);
  //! The acknowledgement of a synchronous message that a probe has taken, to its sender.
  static Message to_acknowledge(const MatchedMessage& taken);
  //! A probe for a message from any rank. It does not fail when all other ranks have departed.
  static Message to_listen(std::uint32_t tag);

  bool sends() const { return posting.verb == Verb::send; }
  std::int64_t lane() const { return sends() ? ChannelTable::sending_lane : ChannelTable::receiving_lane; }
};

//! A started call. Destroying one that has not ended aborts the communicator, because the call's memory may go with it.
class Request {
 public:
  using Clock = std::chrono::steady_clock;

  Request(Endpoint& endpoint, const CallSite& site, std::int64_t called_ns = 0)
      : endpoint_(endpoint), site_(site), called_ns_(called_ns) {}
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  //! The state of the call; any thread may ask.
  Outcome outcome() const { return outcome_.load(std::memory_order_seq_cst); }
  //! The message that an ended receive or probe has matched, if any.
  const std::optional<MatchedMessage>& matched() const { return matched_; }
  //! The bytes of an ended receive that lie on the host, because its channel does not accept the memory that they are
  //! for, or because the operation takes a message.
  std::span<const std::byte> host_copy() const {
    if (host_copy_ == nullptr) return {};
    return {host_copy_.get(), static_cast<std::size_t>(matched_->header.nbytes)};
  }

 private:
  friend class Endpoint;

  Endpoint& endpoint_;
  const CallSite site_;
  const std::int64_t called_ns_;  // 0: the call began at once
  // The call: a collective on this memory, or a message. The starting thread writes it before it queues the request.
  const CompiledCall* call_ = nullptr;
  std::vector<std::byte*> input_;
  std::vector<std::byte*> output_;
  std::optional<Message> message_;
  // Used by the leader only.
  std::optional<std::size_t> record_;
  std::unique_ptr<PointToPoint> operation_;
  std::optional<MatchedMessage> matched_;  // others may read it once the outcome is known
  std::unique_ptr<std::byte[]> host_copy_;
  std::optional<Clock::time_point> idle_since_;
  std::chrono::milliseconds next_report_{10};  // the call is reported as blocked after it has been idle this long
  Clock::rep reported_late_for_ = 0;           // the deadline for which the judges have been asked
  bool has_moved_ = false;                     // since it was found that it takes a while
  // Whether the judges have been asked why the call takes so long, and whether their answer has been reported.
  enum class Slow : std::uint8_t { no, asked, reported } slow_ = Slow::no;
  std::int64_t number_ = -1;  // of a message that has begun
  // Written by the leader when the collective begins; -1 before. Threads that raise an error read it.
  std::atomic<std::int64_t> sequence_{-1};
  // Written by the thread that waits for the call, or that hands it to the server, which is the thread of background
  // calls. The leader reads the times meanwhile.
  std::atomic<double> timeout_s_{0};
  std::atomic<Clock::rep> deadline_{Clock::time_point::max().time_since_epoch().count()};
  std::atomic<Clock::rep> late_from_{Clock::time_point::max().time_since_epoch().count()};
  std::atomic<bool> cancelled_{false};  // a receive that has matched nothing ends without a message
  bool in_background_ = false;          // guarded by the endpoint's mutex
  // The outcome of the call. The leader writes it last, with the endpoint's mutex held. A thread that has read it may
  // read the matched message of the call, and may destroy the request.
  std::atomic<Outcome> outcome_{Outcome::pending};
};

//! One rank of one communicator.
class Endpoint {
 public:
  using Clock = Request::Clock;

  //! `crowded`: this host has more ranks than cores. `members`: the ranks of the job that are ranks 0, 1, ... of this
  //! communicator; empty for all. Channels, calls and counters use ranks of the communicator. Control links and errors
  //! use ranks of the job.
  Endpoint(std::shared_ptr<Control> control, std::uint64_t communicator, bool crowded,
           std::vector<std::int32_t> members = {});
  ~Endpoint();

  //! This rank in the job.
  std::int32_t rank() const { return control_->rank(); }
  //! The number of ranks in the communicator.
  std::int32_t size() const { return members_.empty() ? control_->size() : static_cast<std::int32_t>(members_.size()); }
  //! Converts a rank of the job into the rank in the communicator; throws std::invalid_argument if it has none.
  std::int32_t member(std::int32_t job_rank) const;
  //! The service that all communicators of this process share.
  Control& control() { return *control_; }

  //! Adds a channel for a lane. Any thread may call it.
  void add_channel(std::int64_t lane, std::unique_ptr<Channel> channel);
  //! Whether a library may still use memory of failed calls, which then must never be freed.
  bool memory_must_leak() const { return memory_must_leak_.load(); }
  //! The traffic of each channel, until the endpoint is closed.
  std::vector<ChannelTraffic> traffic() const { return channels_.traffic(); }

  //! Queues a collective. Collectives begin one after the other, in the order of these calls. `call` must outlive the
  //! request.
  std::unique_ptr<Request> start(const CompiledCall& call, const Memory& memory, const CallSite& site);
  //! Begins a collective at once and looks for progress `rounds` times, if no other call or leader is in the way.
  //! Returns false if one is; then nothing has happened. On true, `request` is set only if the collective has not
  //! ended.
  bool try_now(const CompiledCall& call, const Memory& memory, const CallSite& site, std::uint32_t rounds,
               std::unique_ptr<Request>& request);
  //! Corrects the place in the program of a call that `try_now` has begun and that has not ended.
  void set_site(const Request& request, const CallSite& site) { control_->recorder().set_site(*request.record_, site); }
  //! Queues a message; throws std::invalid_argument if there is no such peer.
  std::unique_ptr<Request> start(const Message& message, const CallSite& site);
  //! Begins a message at once, looks for progress `rounds` times, and returns its request, which may have ended.
  //! Returns nullptr, and does nothing, if another call or leader is in the way.
  std::unique_ptr<Request> try_now(const Message& message, const CallSite& site, std::uint32_t rounds);
  //! Returns a number for a synchronous message: a send that ends when a receive has got the message. Any thread may
  //! call it.
  std::uint32_t number_of_synchronous() { return std::max(++synchronous_, std::uint32_t{1}); }
  //! Whether the channel for messages to `peer`, a valid rank, is open.
  bool reaches(std::int32_t peer);
  //! Whether a send to this rank itself would end now: its buffer has room, or a receive is posted for the message.
  bool takes_from_itself(std::uint32_t tag, std::uint64_t nbytes);
  //! Whether the channel to or from a peer accepts messages of `nbytes` in this type of memory; empty if the channel is
  //! not open yet.
  std::optional<bool> accepts(std::int64_t lane, std::int32_t peer, MemoryType memory, std::uint64_t nbytes) {
    return channels_.accepts(lane, peer, memory, nbytes);
  }

  //! See `Channel::retire`; empty also if the channel is not open. `peer` is a rank of the communicator.
  std::optional<StreamState> retire_stream(std::int64_t lane, std::int32_t peer, const BrokenStream& stream);
  //! See `Channel::resume`.
  bool resume_stream(std::int64_t lane, std::int32_t peer, std::uint32_t stream, Connection connection,
                     const StreamState& state);

  //! Lets the server drive a request. It fails if it has not ended in `timeout_s` seconds from now.
  void run_in_background(Request& request, double timeout_s);
  //! Ends a receive without a message, unless it has matched one. Any thread may call it; the leader ends it later.
  void cancel(Request& request);
  //! Looks for progress once.
  Outcome poll(Request& request);
  //! Looks for progress this many times, or until the request has ended, unless there is another leader.
  void poll_rounds(const Request& request, std::uint32_t rounds);
  //! Whether this host has more ranks than cores.
  bool crowded() const { return crowded_; }
  //! Yields this core a few times and looks for progress after each, unless threads that compute want the core.
  void yield_and_poll(const Request& request);
  //! Waits until the request has ended, in any way; `timeout_s` counts from now.
  Outcome wait(Request& request, double timeout_s, Interrupted interrupted);
  //! Waits until the number of ended requests is no longer `seen`, or for `most`. Returns that number.
  std::uint64_t wait_for_end(std::uint64_t seen, std::chrono::milliseconds most);

  //! The description of the latest collective; empty if there is none.
  std::string last_call() const;
  //! Waits until every other rank has made the latest collective too: see `Control::settle`.
  void settle(std::chrono::milliseconds limit, Interrupted interrupted) {
    control_->settle(communicator_, members_, limit, interrupted);
  }
  //! Closes the channels. Later calls fail.
  void close();
  //! Whether this is a forked child, which may use nothing else of the endpoint.
  bool abandoned() const { return control_->abandoned(); }

 private:
  friend class Request;

  // A message with its description, kept for the next equal message.
  struct CachedDescription {
    Message message;
    SharedDescription description;
  };

  // How a thread has waited since the last progress.
  struct Idle {
    std::uint32_t rounds = 0;
    Clock::time_point checked_at{};
    Clock::time_point counted_until{};  // of the time waited; unset since the last progress
    bool polling_pays = true;           // whether to poll, although that takes time from a program that computes

    void note_progress() {
      rounds = 0;
      counted_until = {};
    }
  };

  std::int32_t job_rank(std::int32_t member) const;
  // Queueing.
  std::uint32_t affordable_rounds(std::uint32_t rounds) const;
  bool can_start_now() const { return queued_.load() == 0 && !closed_ && !control_->failed(); }
  void enqueue(Request& request);
  void wake_leader() const;
  static void set_deadline(Request& request, double timeout_s);
  void withdraw(Request& request);

  // Called by the leader only.
  bool drive();
  void begin_messages();
  void begin_message(Request& request);
  std::vector<std::shared_ptr<Mailbox>> mailboxes_of(const Message& message);
  std::shared_ptr<Mailbox> mailbox(std::int64_t lane, std::int32_t peer);
  const SharedDescription& description_of(const Message& message);
  bool begin_collective();
  bool advance_collectives();
  bool advance_messages();
  void record_move(Request& request);
  void finish(Request& request, Outcome outcome);
  void fail_all_requests();
  void fail_here(const std::string& text, FailureKind kind = FailureKind::internal);
  bool start_server();
  void mismatch(const Mismatch& error);
  bool await_verdict();
  std::int64_t current_sequence() const { return current_ != nullptr ? current_->sequence_.load() : -1; }

  // Waiting: see endpoint_waiting.cpp.
  void take_leadership();
  void give_way(bool& leads);
  void step_down();
  void wake_server();
  void follow(const Request& request);
  void await(const Request& request);
  bool runs_in_background(const Request& request) const;
  void serve();
  bool shares_core() const;
  bool yields_help() const;
  std::uint32_t spins(const Idle& idle, bool serving) const;
  std::uint32_t yields(const Idle& idle, bool serving) const;
  bool polling_is_cheap() const;
  void back_off(Idle& idle, bool serving);
  void yield_in_crowd(Idle& idle);
  void run_periodic_checks(Idle& idle);
  void record_waits(Idle& idle, Clock::time_point now);
  void check_deadlines(Clock::time_point now);
  void check_deadline(Request& request, Clock::time_point now);
  void report_late(Request& request);
  void ask_judges(const Request& request, Clock::time_point deadline);
  void report_slow(Request& request, Clock::time_point now);
  bool is_first_waiting(std::int32_t awaited) const;
  std::vector<Request*> pending() const;
  std::chrono::microseconds time_to_next_deadline() const;
  void sleep(Idle& idle, bool serving);
  bool must_stay_awake(bool serving) const;
  bool has_startable_call() const;
  std::vector<Blocked> blocked() const;
  bool peer_has_gone(const Blocked& on) const;
  std::optional<std::int32_t> needed_and_gone(const std::vector<Blocked>& waits) const;
  bool check_closed();
  void report_broken(const std::vector<Blocked>& waits);
  void report_silent(Clock::time_point now);
  void suspect_for_lost_bytes(std::int32_t peer);
  void flush_resumed();
  void time_out(const Request& request);
  std::int32_t peer_of(const Request& request) const;

  std::shared_ptr<Control> control_;
  const std::uint64_t communicator_;
  const bool crowded_;
  const std::vector<std::int32_t> members_;
  ChannelTable channels_;
  // The leader sleeps on it. Peers, the service thread and threads with a new call ring it.
  Doorbell doorbell_;
  std::unique_ptr<Leadership> leadership_;
  CoreDemand demand_;  // the leader measures it
  // Set once, by the thread that closes the endpoint. The leader and the server then end all calls and themselves.
  std::atomic<bool> closed_{false};
  // Whether the leader is asleep, or about to look once more before it sleeps. A thread that queues a call reads it
  // afterwards. Both use sequential consistency, so one of them sees the other.
  std::atomic<bool> asleep_{false};
  // `Channel::extra_yields` and `polls_by_syscall`: the largest value among the channels, and whether it is true of
  // any. The thread that adds a channel writes them with the mutex of the control held. Threads that wait read them
  // without it.
  std::atomic<std::uint32_t> extra_yields_{0};
  std::atomic<bool> polls_by_syscall_{false};
  // The number of the last synchronous message; it begins anew after 2^32.
  std::atomic<std::uint32_t> synchronous_{0};
  // How many requests have ended. The leader counts, and followers compare it with the number that they have seen.
  std::atomic<std::uint64_t> ended_{0};
  // Whether a library may still use memory of failed calls. The thread that fails the calls sets it before it ends
  // their requests, and the owners of the memory read it then.
  std::atomic<bool> memory_must_leak_{false};

  // Queued requests that have not begun, guarded by the mutex. Their number can be read without it.
  mutable std::mutex mutex_;
  std::deque<Request*> collectives_;
  std::deque<Request*> new_messages_;
  std::atomic<std::size_t> queued_{0};
  // The work of the server: background requests that have not ended, and resumed channels with bytes to send again. The
  // thread that adds work counts it, and the leader takes it off. The server leads only while there is some.
  std::atomic<std::size_t> background_count_{0};
  // The server thread. The thread that has the first work for the server starts it, with the mutex held.
  std::thread server_;
  // Whether the server sleeps. The server sets it, and the one thread that clears it rings the server's doorbell.
  std::atomic<bool> server_idle_{false};
  std::atomic<int> awaited_{0};  // threads that wait for requests which the server drives
  Doorbell server_bell_;

  // Used by the leader only, so that taking the lead orders all accesses.
  Collective collective_;
  Request* current_ = nullptr;  // the request of the running collective
  std::exception_ptr error_;    // an error from `try_now`, to be handled by `drive`
  // A message of another call has arrived, and the judges have been asked. The endpoint drives nothing until they
  // answer. After `until` it reports this failure itself.
  struct AwaitedVerdict {
    Failure failure;
    Clock::time_point until;
  };
  std::optional<AwaitedVerdict> awaited_verdict_;
  std::map<std::pair<std::int64_t, std::int32_t>, std::shared_ptr<Mailbox>> mailboxes_;  // by lane and peer
  std::shared_ptr<SelfQueue> to_itself_;            // null before the first message that may be
  std::vector<Request*> messages_;                  // requests that have begun and not ended
  std::vector<Channel*> resumed_;                   // with bytes to send again
  std::array<CachedDescription, 16> descriptions_;  // indexed by a hash of the message
  std::uint32_t next_sequence_ = 0;
  std::int64_t next_message_ = 0;
  Clock::time_point next_check_{};
  Clock::time_point next_loss_report_{};
  Clock::time_point next_look_{};  // at connections that may be silent
};

}  // namespace unisono
