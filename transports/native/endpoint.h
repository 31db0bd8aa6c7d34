// One rank of one communicator: its channels, the sequence of its calls, and the waiting for them.
//
// Theory of operation of waiting. A waiting rank looks for progress again and again: first at once, then after giving
// up its core to others, and at last asleep until its doorbell rings or a socket becomes ready. With a core for each
// rank it spins for some tens of microseconds; with fewer it yields at once. While it waits it looks at the failure
// flag each time, and at the clock, signals and closed links now and then.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective.h"
#include "control.h"
#include "doorbell.h"
#include "point_to_point.h"

namespace unisono {

// Whether the program wants the wait to end (Ctrl-C); called from time to time by the waiting thread.
using Interrupted = bool (*)();

enum class Outcome : std::uint8_t { pending, done, failed, interrupted };

struct ChannelTraffic {
  std::int32_t peer;
  const char* transport;
  Counters counters;
};

class Endpoint;

// A started call. Dropping one that has not ended aborts the communicator, for its memory may go with it.
class Request {
 public:
  explicit Request(Endpoint& endpoint) : endpoint_(endpoint) {}
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

 private:
  friend class Endpoint;
  Endpoint& endpoint_;
  std::size_t record_ = 0;
  std::int64_t sequence_ = -1;  // of a collective
  std::exception_ptr error_;    // found where it could not be dealt with; raised by the next look for progress
  std::unique_ptr<Operation> operation_;
  Outcome outcome_ = Outcome::pending;
};

class Endpoint {
 public:
  using Clock = std::chrono::steady_clock;

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
  // What has gone over each channel, until the endpoint is closed.
  std::vector<ChannelTraffic> traffic() const;

  // Starts a collective; one after the other, in the order of the calls. `call` must outlive the request.
  std::unique_ptr<Request> start(const CompiledCall& call, const Memory& memory, const CallSite& site);
  // Starts a collective and, if no other one is going on, looks for progress `rounds` times. Returns nothing if it has
  // ended well by then.
  std::unique_ptr<Request> start_and_spin(const CompiledCall& call, const Memory& memory, const CallSite& site,
                                          std::uint32_t rounds);
  // Corrects where a call stands in the user's program.
  void set_site(const Request& request, const CallSite& site) { control_->recorder().set_site(request.record_, site); }
  // Starts sending `nbytes` at `data` to a peer, or receiving them.
  std::unique_ptr<Request> send(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data, std::size_t nbytes,
                                const CallSite& site);
  std::unique_ptr<Request> receive(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data,
                                   std::size_t nbytes, const CallSite& site);

  // Looks once for progress.
  Outcome poll(Request& request);
  // Waits until the request has ended, one way or another; `timeout_s` is counted from now.
  Outcome wait(Request& request, double timeout_s, Interrupted interrupted);

  // Closes the channels. Later calls fail.
  void close();
  // Whether this is a forked child, where nothing else here may be used.
  bool abandoned() const { return control_->abandoned(); }

 private:
  friend class Request;
  struct Waiting {
    double timeout_s;
    Clock::time_point started{};
    Clock::time_point next_signal_check{};
    bool reported = false;   // as blocked
    std::uint32_t idle = 0;  // rounds without progress
  };

  std::int32_t job_rank(std::int32_t member) const;
  static bool spin(Collective& collective, std::uint32_t rounds, std::exception_ptr& error);
  std::unique_ptr<Request> point_to_point(std::int32_t peer, const Parcel& parcel, bool sends, const char* verb,
                                          const CallSite& site);
  bool advance(Request& request);
  bool advance_collectives();
  bool advance_messages();
  std::vector<Blocked> blocked_messages() const;
  void finish(Request& request, Outcome outcome);
  void withdraw(Request& request);
  bool rest(Request& request, Waiting& waiting, Interrupted interrupted);
  bool look_around(Request& request, Waiting& waiting, Interrupted interrupted);
  void sleep(Request& request, Waiting& waiting);
  void check_closed(Request& request);
  void give_up_if_failed(Request& request);
  void time_out(Request& request, const Waiting& waiting);
  void lose(std::int32_t peer, const Request& request);
  void mismatch(const Mismatch& found);
  void await_verdict(std::chrono::milliseconds most, Failure otherwise);
  const Request& driven_for(const Request& request) const;
  std::int64_t driven_sequence(const Request& request) const;
  std::vector<Blocked> blocked_on(const Request& request) const;

  std::shared_ptr<Control> control_;
  const std::uint64_t communicator_;
  const bool crowded_;
  const std::vector<std::int32_t> members_;
  ChannelTable channels_;
  mutable std::mutex mutex_;  // of everything below, and held by whoever makes progress
  std::map<std::pair<std::int64_t, std::int32_t>, std::shared_ptr<Mailbox>> mailboxes_;  // by lane and peer
  std::deque<Request*> collectives_;  // started and not ended, in order
  std::unique_ptr<Collective> spare_collective_;
  std::uint32_t next_sequence_ = 0;
  std::uint64_t next_point_to_point_ = 0;
  Doorbell doorbell_;
  bool closed_ = false;
};

}  // namespace unisono
