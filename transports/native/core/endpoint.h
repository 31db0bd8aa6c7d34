// One rank of one communicator: its channels, the sequence of its calls, and the waiting for them.
//
// Theory of operation. Calls are handed in by any thread, and driven by the one that has the lead: a thread that waits
// for its call takes the lead if it is free, and else follows, asleep. A call that shall go on by itself is driven by
// the endpoint's own thread, which lives from the first such call on, and leaves the lead to whoever waits for another
// one. Collectives are driven one after the other, in the order in which they were handed in; messages between two
// ranks all together. A small call that finds the lead free and nothing before it is driven at once, without being
// handed in.
//
// A waiting leader looks for progress again and again: first at once, then after giving up its core to others, and at
// last asleep until its doorbell rings or a socket becomes ready. With a core for each rank it spins for some tens of
// microseconds; where others want its core, it yields at once, and in a crowd looks a few times only where something
// would arrive. The endpoint's own thread hardly spins, for its core is the one that the program computes on, until the
// program waits for it; it runs when something arrives, which a thread that has computed does only in its turn. So who
// waits for a call that goes on by itself drives it only as long as it spins. While a leader waits it looks at the
// failure flag each time, and at the clock and at closed links now and then; whoever waits looks at signals.
#pragma once

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

#include "collective.h"
#include "control.h"
#include "doorbell.h"
#include "leadership.h"
#include "point_to_point.h"

namespace unisono {

// Whether the program wants the wait to end (Ctrl-C); called from time to time by the waiting thread, which does not
// lead then.
using Interrupted = bool (*)();

enum class Outcome : std::uint8_t { pending, done, failed, interrupted };

class Endpoint;

// What is done with a message, and with whom.
struct Message {
  std::optional<std::int32_t> peer;  // none: any
  Posting posting;

  // `nbytes` at `data` are sent to a peer, or received; from any other rank, or with any tag that is not reserved,
  // where none is given. A probe ends when such a message is there, or, if it looks `once`, in any case.
  static Message to_send(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data, std::size_t nbytes,
                         MemoryType memory = MemoryType::host);
  static Message to_receive(std::optional<std::int32_t> peer, DType dtype, std::optional<std::uint32_t> tag,
                            std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host);
  static Message to_probe(std::optional<std::int32_t> peer, std::optional<std::uint32_t> tag, bool once);

  bool sends() const { return posting.verb == Verb::send; }
  std::int64_t lane() const { return sends() ? ChannelTable::sending_lane : ChannelTable::receiving_lane; }
};

// A started call. Dropping one that has not ended aborts the communicator, for its memory may go with it.
class Request {
 public:
  using Clock = std::chrono::steady_clock;

  Request(Endpoint& endpoint, const CallSite& site) : endpoint_(endpoint), site_(site) {}
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  Outcome outcome() const { return outcome_.load(std::memory_order_seq_cst); }
  // The message that a receive or a probe that has ended has found, if any.
  const std::optional<Found>& found() const { return found_; }
  // What a receive that has ended has left on the host, as its channel does not take the memory that it is for.
  std::span<const std::byte> aside() const {
    if (aside_ == nullptr) return {};
    return {aside_.get(), static_cast<std::size_t>(message_->posting.parcel.header.nbytes)};
  }

 private:
  friend class Endpoint;

  Endpoint& endpoint_;
  const CallSite site_;
  // What is called: a collective on some memory, or a message.
  const CompiledCall* call_ = nullptr;
  std::vector<std::byte*> input_;
  std::vector<std::byte*> output_;
  std::optional<Message> message_;
  // Of whoever leads.
  std::optional<std::size_t> record_;
  std::unique_ptr<PointToPoint> operation_;
  std::optional<Found> found_;  // read by others once the outcome is known
  std::unique_ptr<std::byte[]> aside_;
  std::optional<Clock::time_point> idle_since_;
  std::chrono::milliseconds next_report_{10};  // as blocked, after it has been idle for so long
  bool reported_late_ = false;
  std::int64_t number_ = -1;  // of a message that has begun
  // Of all.
  std::atomic<std::int64_t> sequence_{-1};  // of a collective that has begun
  std::atomic<double> timeout_s_{0};
  std::atomic<Clock::rep> deadline_{Clock::time_point::max().time_since_epoch().count()};
  std::atomic<Clock::rep> late_from_{Clock::time_point::max().time_since_epoch().count()};
  bool goes_on_ = false;  // by itself; guarded by the endpoint's mutex
  std::atomic<Outcome> outcome_{Outcome::pending};
};

class Endpoint {
 public:
  using Clock = Request::Clock;

  // `crowded`: there are more ranks than cores on this host. `members`: the ranks of the job that are the ranks 0, 1, …
  // of this communicator; none stands for all. Channels, calls and counters go by the ranks of the communicator; what
  // goes over control links, and what users read in errors, by those of the job.
  Endpoint(std::shared_ptr<Control> control, std::uint64_t communicator, bool crowded,
           std::vector<std::int32_t> members = {});
  ~Endpoint();

  // Of the job.
  std::int32_t rank() const { return control_->rank(); }
  // Of the communicator.
  std::int32_t size() const { return members_.empty() ? control_->size() : static_cast<std::int32_t>(members_.size()); }
  // The rank in the communicator of a rank of the job; throws std::invalid_argument if it has none.
  std::int32_t member(std::int32_t job_rank) const;
  Control& control() { return *control_; }

  void add_channel(std::int64_t lane, std::unique_ptr<Channel> channel);
  // Whether a library may still use memory of calls that have failed here, which then must never be freed.
  bool memory_forsaken() const { return memory_forsaken_.load(); }
  // What has gone over each channel, until the endpoint is closed.
  std::vector<ChannelTraffic> traffic() const { return channels_.traffic(); }

  // Hands in a collective; one is begun after the other, in the order of the calls. `call` must outlive the request.
  std::unique_ptr<Request> start(const CompiledCall& call, const Memory& memory, const CallSite& site);
  // If nothing stands in its way, begins a collective and looks for progress `rounds` times: true, and `request` is
  // what has not ended by then. Otherwise false, and nothing has been done.
  bool try_now(const CompiledCall& call, const Memory& memory, const CallSite& site, std::uint32_t rounds,
               std::unique_ptr<Request>& request);
  // Corrects where a call that `try_now` has begun, and that has not ended, stands in the user's program.
  void set_site(const Request& request, const CallSite& site) { control_->recorder().set_site(*request.record_, site); }
  // Hands in a message; throws std::invalid_argument if there is no such peer.
  std::unique_ptr<Request> start(const Message& message, const CallSite& site);
  // If nothing stands in its way, begins a message, looks for progress `rounds` times, and returns its request, which
  // may have ended. Otherwise returns nullptr, and nothing has been done.
  std::unique_ptr<Request> try_now(const Message& message, const CallSite& site, std::uint32_t rounds);
  // Whether a channel is open by which a message would be sent to a peer, which there must be.
  bool reaches(std::int32_t peer);
  // Whether the channel to a peer, or from it, takes messages of `nbytes` in such memory; nothing if there is none yet.
  std::optional<bool> takes(std::int64_t lane, std::int32_t peer, MemoryType memory, std::uint64_t nbytes) {
    return channels_.takes(lane, peer, memory, nbytes);
  }

  // Lets a request go on by itself, and fail if it has not ended in `timeout_s` seconds from now.
  void go_on(Request& request, double timeout_s);
  // Looks once for progress.
  Outcome poll(Request& request);
  // Looks for progress so many times, or until the request has ended, unless another thread does.
  void look(const Request& request, std::uint32_t rounds);
  // Whether ranks share cores.
  bool crowded() const { return crowded_; }
  // Lets others have this core a few times, and looks for progress after each.
  void give_turns(const Request& request);
  // Waits until the request has ended, one way or another; `timeout_s` is counted from now.
  Outcome wait(Request& request, double timeout_s, Interrupted interrupted);
  // How many requests have ended so far, once it is not `seen` any more, or when `most` has passed.
  std::uint64_t wait_for_end(std::uint64_t seen, std::chrono::milliseconds most);

  // The latest collective, as errors show it; empty if there has been none.
  std::string last_call() const;
  // Waits until every other rank has made the latest collective too: see `Control::settle`.
  void settle(std::chrono::milliseconds limit, Interrupted interrupted) {
    control_->settle(communicator_, members_, limit, interrupted);
  }
  // Closes the channels. Later calls fail.
  void close();
  // Whether this is a forked child, where nothing else here may be used.
  bool abandoned() const { return control_->abandoned(); }

 private:
  friend class Request;

  // How a call of messages is shown, kept for the next one that is the same.
  struct Described {
    Message message;
    std::shared_ptr<const std::string> text;
  };

  // How a thread has waited since something last moved.
  struct Idle {
    std::uint32_t rounds = 0;
    Clock::time_point looked{};
    bool is_worthwhile = true;  // to look again and again, for whoever computes meanwhile
  };

  std::int32_t job_rank(std::int32_t member) const;
  // Handing in.
  std::uint32_t affordable(std::uint32_t rounds) const;
  bool is_free_for_more() const { return handed_in_.load() == 0 && !closed_ && !control_->failed(); }
  void hand_in(Request& request);
  void wake_leader() const;
  static void set_deadline(Request& request, double timeout_s);
  void withdraw(Request& request);

  // By whoever leads.
  bool drive();
  void begin_messages();
  void begin_message(Request& request);
  std::vector<std::shared_ptr<Mailbox>> mailboxes_of(const Message& message);
  const std::shared_ptr<const std::string>& description_of(const Message& message);
  bool begin_collective();
  bool advance_collectives();
  bool advance_messages();
  void finish(Request& request, Outcome outcome);
  void give_all_up();
  void fail_here(const std::string& text, FailureKind kind = FailureKind::internal);
  bool start_server();
  void mismatch(const Mismatch& found);
  bool drive_nothing();
  std::int64_t current_sequence() const { return current_ != nullptr ? current_->sequence_.load() : -1; }

  // Waiting: see endpoint_waiting.cpp.
  void take_lead();
  void give_up_lead();
  void wake_server();
  void follow(const Request& request);
  void await(const Request& request);
  bool goes_on(const Request& request) const;
  void serve();
  bool shares_core(const Idle& idle) const;
  std::uint32_t spins(const Idle& idle, bool serving) const;
  std::uint32_t yields(const Idle& idle, bool serving) const;
  bool looks_are_cheap() const;
  void rest(Idle& idle, bool serving);
  void yield_in_crowd();
  void look_around(Idle& idle);
  void check_deadlines(Clock::time_point now);
  void check_deadline(Request& request, Clock::time_point now);
  void report_late(Request& request);
  std::vector<Request*> pending() const;
  std::chrono::microseconds time_to_next_deadline() const;
  void sleep(Idle& idle, bool serving);
  bool disturbed(bool serving) const;
  bool may_begin() const;
  std::vector<Blocked> blocked() const;
  bool gone(const Blocked& on) const;
  bool check_closed();
  void time_out(const Request& request);
  std::int32_t peer_of(const Request& request) const;

  std::shared_ptr<Control> control_;
  const std::uint64_t communicator_;
  const bool crowded_;
  const std::vector<std::int32_t> members_;
  ChannelTable channels_;
  Doorbell doorbell_;
  std::unique_ptr<Leadership> lead_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> asleep_{false};            // whoever leads
  std::atomic<std::uint32_t> patience_{0};     // the most of its channels
  std::atomic<bool> looks_ask_kernel_{false};  // at any of its channels
  std::atomic<std::uint64_t> ended_{0};
  std::atomic<bool> memory_forsaken_{false};

  // What has been handed in and not begun, under the mutex; the number of it can be read without.
  mutable std::mutex mutex_;
  std::deque<Request*> collectives_;
  std::deque<Request*> new_messages_;
  std::atomic<std::size_t> handed_in_{0};
  std::atomic<std::size_t> going_on_{0};  // requests that go on by themselves and have not ended
  std::thread server_;
  std::atomic<bool> server_idle_{false};
  std::atomic<int> awaited_{0};  // threads that wait for what the server drives
  Doorbell server_bell_;

  // Of whoever leads.
  Collective collective_;
  Request* current_ = nullptr;  // whose collective it is
  std::exception_ptr error_;    // found where it could not be dealt with
  // A message of another call has arrived, and the judges have been asked: nothing is driven until they have spoken, or
  // until this failure speaks for them.
  struct Unjudged {
    Failure failure;
    Clock::time_point until;
  };
  std::optional<Unjudged> unjudged_;
  std::map<std::pair<std::int64_t, std::int32_t>, std::shared_ptr<Mailbox>> mailboxes_;  // by lane and peer
  std::vector<Request*> messages_;                                                       // begun and not ended
  std::array<Described, 16> described_;  // by a part of what they are of
  std::uint32_t next_sequence_ = 0;
  std::int64_t next_message_ = 0;
  Clock::time_point next_check_{};
  Clock::time_point contended_until_{};
};

}  // namespace unisono
