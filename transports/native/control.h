// Liveness and errors. One service thread per process, which never takes the interpreter's lock, serves the control
// links: a star with rank 0 in the middle (the hub).
//
// Theory of operation. A link that ends without a word of farewell means that its rank has died; on the hub's host a
// pidfd says so too. The first failure that reaches the hub, or that the hub finds, is sent to everybody; each rank
// then wakes its waiting calls, which end with it, and refuses later ones. A rank whose call is blocked, has timed out,
// or received something that belongs to another call reports it; the hub then asks all ranks what they know of that
// call, from the record of their last calls, and gives a verdict if they disagree (or if time is up). No message is
// sent for calls that go on.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "descriptor.h"
#include "doorbell.h"
#include "failure.h"
#include "frame.h"
#include "inquiry.h"
#include "recorder.h"

namespace unisono {

class Control {
 public:
  Control(std::int32_t rank, std::int32_t size);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  std::int32_t rank() const { return rank_; }
  std::int32_t size() const { return size_; }
  Recorder& recorder() { return recorder_; }

  // Takes over an authenticated socket to the control of `peer` (rank 0, or on rank 0 any other), and a pidfd of it or
  // -1.
  void add_link(std::int32_t peer, Descriptor socket, Descriptor process);
  std::size_t links() const;

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  // Reports a failure; the first one stays, and is told to all ranks.
  void fail(Failure failure);
  // Reports the loss of a peer. If there is word within a moment of the failure for which it left, that one stays; or
  // else the loss is told by what the peer said when it left, or by what was `seen`.
  void lose(std::int32_t peer, std::int64_t sequence, const std::string& seen);
  // Reports that a call is blocked, has timed out, or received something of another call; the verdict comes as a
  // failure. `members` are the ranks of the communicator; none stands for all.
  void report(FrameType reason, std::uint64_t communicator, const std::vector<std::int32_t>& members,
              std::int64_t sequence, const std::string& text);

  bool departed(std::int32_t peer) const;
  // Whether it had left at that time.
  bool departed_by(std::int32_t peer, std::chrono::steady_clock::time_point time) const;
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
  using Clock = std::chrono::steady_clock;
  struct Link {
    Descriptor socket;
    Descriptor process;
    std::string in;
    std::string out;
    bool open = false;
  };
  struct Question {
    Inquiry inquiry;
    std::int32_t round = 0;  // tells the answers from those to a question before
    Clock::time_point deadline;
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
  void tell_the_past(std::int32_t peer);
  Frame farewell_frame(std::int32_t peer) const;
  Frame failure_frame() const;
  void send_to_others(std::int32_t except, const Frame& frame);
  void set_failure(Failure failure, std::int32_t told_by);
  void note_departure(std::int32_t peer, const std::string& farewell);
  void ring_all() const;
  void inquire(std::int32_t reporter, const Frame& report);
  void ask(std::int32_t peer, const Frame& query);
  std::vector<Testimony> testimonies_of(const std::vector<std::int32_t>& members) const;
  void take_testimony(std::int32_t from, const Frame& frame);
  void judge(Question& question, bool final);
  Frame testify(const Frame& query) const;
  bool is_hub() const { return rank_ == 0; }

  const std::int32_t rank_;
  const std::int32_t size_;
  Recorder recorder_;
  mutable std::mutex mutex_;
  std::vector<Link> links_;  // by peer
  std::vector<std::optional<std::chrono::steady_clock::time_point>> departures_;
  std::vector<std::string> farewells_;
  std::vector<int> doorbells_;
  std::map<std::uint64_t, Question> questions_;  // the latest of each communicator
  std::int32_t rounds_ = 0;
  Failure failure_;
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> frames_sent_{0};
  Doorbell wake_;
  bool stopping_ = false;
  bool abandoned_ = false;
  std::thread service_;
};

}  // namespace unisono
