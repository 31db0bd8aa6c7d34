// Background calls, beside calls that a thread waits for.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "plan_words.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using namespace std::chrono_literals;

constexpr double timeout_s = 60;
constexpr double short_s = 0.2;
constexpr std::uint32_t rounds = 50;

// Allreduces in place by one rank. The `index`-th array is initially filled with `index` + 1.
class Sums {
 public:
  Sums(Endpoint& endpoint, std::size_t number, std::size_t count)
      : endpoint_(endpoint),
        call_(compile(ring_allreduce(endpoint.size(), endpoint.rank()).encode(),
                      {static_cast<std::int64_t>(count), DType::float32, Combine::sum}, 1)),
        requests_(number) {
    for (std::size_t index = 0; index < number; ++index) arrays_.emplace_back(count, static_cast<float>(index + 1));
  }

  void start(std::size_t index) {
    std::byte* data = at(index);
    requests_[index] = endpoint_.start(call_, {{&data, 1}, {&data, 1}}, {});
  }
  void run_in_background(std::size_t index, double limit_s = timeout_s) {
    start(index);
    endpoint_.run_in_background(*requests_[index], limit_s);
  }
  bool try_now(std::size_t index) {
    std::byte* data = at(index);
    return endpoint_.try_now(call_, {{&data, 1}, {&data, 1}}, {}, rounds, requests_[index]);
  }
  // Waits as a blocking call does.
  void run(std::size_t index) {
    if (!try_now(index)) start(index);
    CHECK(requests_[index] == nullptr || endpoint_.wait(*requests_[index], timeout_s, nullptr) == Outcome::done);
  }
  Outcome outcome(std::size_t index) const {
    return requests_[index] == nullptr ? Outcome::done : requests_[index]->outcome();
  }
  bool ended(std::size_t index) const { return outcome(index) != Outcome::pending; }
  bool all_ended() const {
    for (std::size_t index = 0; index < requests_.size(); ++index)
      if (!ended(index)) return false;
    return true;
  }
  bool right(std::size_t index) const {
    const auto sum = static_cast<float>((index + 1) * static_cast<std::size_t>(endpoint_.size()));
    return outcome(index) == Outcome::done &&
           std::all_of(arrays_[index].begin(), arrays_[index].end(), [&](const float value) { return value == sum; });
  }
  bool all_right() const {
    for (std::size_t index = 0; index < requests_.size(); ++index)
      if (!right(index)) return false;
    return true;
  }
  Request& request(std::size_t index) { return *requests_[index]; }
  void drop(std::size_t index) { requests_[index].reset(); }

 private:
  std::byte* at(std::size_t index) { return reinterpret_cast<std::byte*>(arrays_[index].data()); }

  Endpoint& endpoint_;
  CompiledCall call_;
  std::vector<std::vector<float>> arrays_;
  std::vector<std::unique_ptr<Request>> requests_;  // destroyed before the others
};

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t nbytes, std::size_t seed) {
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 + seed);
  return bytes;
}

// For messages between two ranks.
std::unique_ptr<Request> send(Endpoint& endpoint, std::uint32_t tag, Bytes& data) {
  return endpoint.start(Message::to_send(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size()), {});
}

std::unique_ptr<Request> receive(Endpoint& endpoint, std::uint32_t tag, Bytes& data) {
  return endpoint.start(Message::to_receive(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size()), {});
}

bool ended(const Request& request) { return request.outcome() != Outcome::pending; }

// --- background calls on which no thread waits
// ------------------------------------------------------------------------

void background_collectives_end_without_a_waiter() {
  for (const Transport transport : transports) {
    for (const std::size_t count : {1, 20000, 100000}) {
      Ranks ranks(3, transport);
      ranks.run([&](std::int32_t, Endpoint& endpoint) {
        Sums sums(endpoint, 4, count);
        for (std::size_t index = 0; index < 4; ++index) sums.run_in_background(index);
        CHECK(eventually([&] { return sums.all_ended(); }));
        CHECK(sums.all_right());
      });
    }
  }
}

void background_messages_end_without_a_waiter() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      for (const std::size_t nbytes : {0, 1, 1 << 20}) {
        Bytes out = pattern(nbytes, static_cast<std::size_t>(rank));
        Bytes in(nbytes);
        const auto receiving = receive(endpoint, 4, in);
        const auto sending = send(endpoint, 4, out);
        endpoint.run_in_background(*receiving, timeout_s);
        endpoint.run_in_background(*sending, timeout_s);
        CHECK(eventually([&] { return ended(*receiving) && ended(*sending); }));
        CHECK(in == pattern(nbytes, static_cast<std::size_t>(1 - rank)));
      }
    });
  }
}

// Rank 0 starts all calls before rank 1 starts its first.
void hundreds_of_queued_calls_end_in_their_order() {
  constexpr std::size_t number = 300;
  for (const Transport transport : {Transport::shm, Transport::tcp}) {
    Ranks ranks(2, transport);
    std::atomic<bool> all_started{false};
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      Sums sums(endpoint, number, 16);
      if (rank == 1) CHECK(eventually([&] { return all_started.load(); }));
      for (std::size_t index = 0; index < number; ++index) sums.run_in_background(index);
      all_started = true;
      CHECK(eventually([&] {
        for (std::size_t index = number, later = 0; index-- != 0;) {  // the last one is checked first
          later += sums.ended(index);                                 // no call ends before an earlier one
          CHECK(later == 0 || sums.ended(index));
        }
        return sums.all_ended();
      }));
      CHECK(sums.all_right());
    });
  }
}

void wait_for_end_counts_the_ended_calls() {
  Ranks ranks(2, Transport::shm);
  ranks.run([&](std::int32_t, Endpoint& endpoint) {
    constexpr std::size_t number = 20;
    CHECK(endpoint.wait_for_end(0, 0ms) == 0);
    Sums sums(endpoint, number, 100);
    for (std::size_t index = 0; index < number; ++index) sums.run_in_background(index);
    std::uint64_t seen = 0;
    while (seen < number) seen = endpoint.wait_for_end(seen, 1h);
    CHECK(seen == number && sums.all_right());
  });
}

// --- background calls beside calls on which a thread waits
// -------------------------------------------------------------

// Each rank has one thread for collectives, some of them in the background, and two threads for messages.
void threads_may_mix_blocking_and_background_calls() {
  constexpr std::size_t number = 30;
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      std::atomic<int> failures{0};
      const auto exchange = [&](std::uint32_t tag, std::size_t nbytes) {
        for (std::size_t round = 0; round < number; ++round) {
          Bytes out = pattern(nbytes, round + static_cast<std::size_t>(rank));
          Bytes in(nbytes);
          const auto receiving = receive(endpoint, tag, in);
          const auto sending = send(endpoint, tag, out);
          if (round % 2 == 0) endpoint.run_in_background(*sending, timeout_s);
          failures += endpoint.wait(*receiving, timeout_s, nullptr) != Outcome::done;
          failures += !eventually([&] { return endpoint.poll(*sending) == Outcome::done; });
          failures += in != pattern(nbytes, round + static_cast<std::size_t>(1 - rank));
        }
      };
      std::thread small([&] { exchange(1, 10); });
      std::thread large([&] { exchange(2, 100000); });
      {
        Dice dice(static_cast<std::uint64_t>(rank));
        Sums sums(endpoint, 2 * number, 3000);
        for (std::size_t index = 0; index < 2 * number; ++index) {
          if (dice.below(2) == 0)
            sums.run_in_background(index);
          else
            sums.run(index);
        }
        failures += !eventually([&] { return sums.all_ended(); });
        failures += !sums.all_right();
      }
      small.join();
      large.join();
      CHECK(failures == 0);
    });
  }
}

// Rank 0 waits for a message during a background collective. The collective can end only after that wait, because rank
// 1 starts it only then.
void a_waiter_takes_the_lead_and_gives_it_back() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    std::atomic<std::size_t> received{0};
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      constexpr std::size_t number = 100;
      Sums sums(endpoint, number, 10);
      Bytes data(1);
      for (std::size_t index = 0; index < number; ++index) {
        if (rank == 0) {
          sums.run_in_background(index);
          const auto request = receive(endpoint, 0, data);
          CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::done);
          received = index + 1;
          CHECK(eventually([&] { return sums.ended(index); }));
        } else {
          const auto request = send(endpoint, 0, data);
          CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::done);
          CHECK(eventually([&] { return received.load() > index; }));
          sums.run(index);
        }
        CHECK(sums.right(index));
      }
    });
  }
}

void two_threads_may_wait_for_one_background_call() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t, Endpoint& endpoint) {
      Sums sums(endpoint, 30, 30000);
      std::atomic<int> failures{0};
      for (std::size_t index = 0; index < 30; ++index) {
        sums.run_in_background(index);
        Request& request = sums.request(index);
        const auto wait = [&] { failures += endpoint.wait(request, timeout_s, nullptr) != Outcome::done; };
        std::thread other(wait);
        wait();
        other.join();
      }
      CHECK(failures == 0 && sums.all_right());
    });
  }
}

void try_now_fails_while_a_background_call_runs() {
  Ranks ranks(2, Transport::shm);
  Endpoint& endpoint = ranks.endpoint(0);
  Sums sums(endpoint, 2, 10);
  sums.run_in_background(0);
  for (int attempt = 0; attempt < 1000; ++attempt) CHECK(!sums.try_now(1));
  std::thread peer([&] {
    Sums theirs(ranks.endpoint(1), 2, 10);
    theirs.run(0);
    theirs.run(1);
  });
  CHECK(eventually([&] { return sums.ended(0); }));
  const bool began = eventually([&] { return sums.try_now(1); });
  if (!sums.ended(1)) endpoint.wait(sums.request(1), timeout_s, nullptr);
  peer.join();
  CHECK(began && sums.all_right());
}

// --- time limits, and calls that end early
// ----------------------------------------------------------------------------

void a_background_collective_times_out() {
  Ranks ranks(2, Transport::tcp);
  Sums sums(ranks.endpoint(0), 2, 10);
  sums.run_in_background(0, timeout_s);
  sums.run_in_background(1, short_s);  // it is queued behind call 0, and not begun when its time is over
  CHECK(eventually([&] { return sums.all_ended(); }));
  CHECK(sums.outcome(0) == Outcome::failed && sums.outcome(1) == Outcome::failed);
  CHECK(ranks.control(0).failure().kind == FailureKind::timeout);
  CHECK(ranks.control(0).failure().text.find("rank 1 has not called it") != std::string::npos);
}

void a_background_message_times_out() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Bytes data(100);
    const auto request = receive(ranks.endpoint(0), 0, data);
    ranks.endpoint(0).run_in_background(*request, short_s);
    CHECK(eventually([&] { return request->outcome() == Outcome::failed; }));
    CHECK(ranks.control(0).failure().kind == FailureKind::timeout && ranks.control(0).failure().peer == 1);
  }
}

void a_background_call_times_out_while_another_thread_leads() {
  Ranks ranks(2, Transport::shm);
  Endpoint& endpoint = ranks.endpoint(0);
  Bytes data(100);
  const auto waited = receive(endpoint, 0, data);
  std::thread waiter([&] { endpoint.wait(*waited, timeout_s, nullptr); });
  Bytes other(100);
  const auto request = receive(endpoint, 1, other);
  endpoint.run_in_background(*request, short_s);
  const bool failed = eventually([&] { return request->outcome() == Outcome::failed; });
  waiter.join();
  CHECK(failed && waited->outcome() == Outcome::failed);
}

void closing_ends_background_calls() {
  for (const Transport transport : transports) {
    for (int attempt = 0; attempt < 8; ++attempt) {
      Ranks ranks(2, transport);
      Endpoint& endpoint = ranks.endpoint(0);
      Sums sums(endpoint, 4, 100000);
      Bytes data(100);
      const auto message = receive(endpoint, 0, data);
      endpoint.run_in_background(*message, timeout_s);
      for (std::size_t index = 0; index < 3; ++index) sums.run_in_background(index);
      std::thread listener([&] {
        for (std::uint64_t seen = 0; seen < 4;) seen = endpoint.wait_for_end(seen, 1h);
      });
      Sums theirs(ranks.endpoint(1), 1, 100000);
      theirs.run_in_background(0);  // rank 1 may be in the middle of call 0 when rank 0 closes
      if (attempt % 2 == 0) std::this_thread::sleep_for(1ms);
      endpoint.close();
      listener.join();
      CHECK(message->outcome() == Outcome::failed && sums.outcome(2) == Outcome::failed);
      CHECK(sums.ended(0) && sums.ended(1));
      sums.run_in_background(3);  // later calls fail when they are polled
      CHECK(endpoint.poll(sums.request(3)) == Outcome::failed);
      endpoint.close();
    }
  }
}

void calls_may_be_started_while_another_thread_closes() {
  for (int attempt = 0; attempt < 50; ++attempt) {
    Ranks ranks(2, Transport::shm);
    Endpoint& endpoint = ranks.endpoint(0);
    Sums sums(endpoint, 20, 10);
    std::thread closer([&] { endpoint.close(); });
    for (std::size_t index = 0; index < 20; ++index) sums.run_in_background(index);
    closer.join();
    for (std::size_t index = 0; index < 20; ++index)
      CHECK(endpoint.wait(sums.request(index), timeout_s, nullptr) == Outcome::failed);
  }
}

void dropping_a_background_call_aborts_all_ranks() {
  for (const Transport transport : transports) {
    for (int attempt = 0; attempt < 8; ++attempt) {
      Ranks ranks(2, transport);
      Sums ours(ranks.endpoint(0), 2, 100000);
      Sums theirs(ranks.endpoint(1), 2, 100000);
      for (Sums* sums : {&ours, &theirs}) sums->run_in_background(0);
      theirs.run_in_background(1);
      ours.drop(0);  // it may have ended
      CHECK(eventually([&] { return theirs.ended(0); }));
      ours.run_in_background(1);
      ours.drop(1);
      CHECK(eventually([&] { return theirs.ended(1); }));
      CHECK(!ranks.control(1).failed() || ranks.control(1).failure().kind == FailureKind::aborted);
      CHECK(ranks.control(1).failed() || theirs.all_right());
    }
  }
}

void a_failure_ends_background_calls() {
  for (const Transport transport : transports) {
    Ranks ranks(3, transport);
    Sums first(ranks.endpoint(0), 3, 1000);
    Sums second(ranks.endpoint(1), 3, 1000);
    for (std::size_t index = 0; index < 3; ++index) {
      first.run_in_background(index);
      second.run_in_background(index);
    }
    ranks.control(2).fail({FailureKind::aborted, 2, -1, -1, "out of patience"});
    CHECK(eventually([&] { return first.all_ended() && second.all_ended(); }));
    CHECK(first.outcome(2) == Outcome::failed && second.outcome(0) == Outcome::failed);
    CHECK(ranks.control(0).failure().text == "out of patience");
  }
}

void a_mismatch_ends_background_messages() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Bytes out = pattern(100, 0);
    Bytes in(50);
    const auto sending = send(ranks.endpoint(0), 1, out);
    const auto receiving = receive(ranks.endpoint(1), 1, in);
    ranks.endpoint(0).run_in_background(*sending, timeout_s);
    ranks.endpoint(1).run_in_background(*receiving, timeout_s);
    CHECK(eventually([&] { return receiving->outcome() == Outcome::failed && ended(*sending); }));
    CHECK(ranks.control(1).failure().kind == FailureKind::mismatch);
  }
}

void a_peer_that_closes_ends_background_calls() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Sums sums(ranks.endpoint(0), 1, 10);
    sums.run_in_background(0);
    ranks.endpoint(1).close();
    CHECK(eventually([&] { return sums.outcome(0) == Outcome::failed; }));
    CHECK(ranks.control(0).failure().kind == FailureKind::peer_lost);
  }
}

// --- fork ------------------------------------------------------------------------------------------------------------

// A forked child has only the thread that forked: no service thread, and no follower of a leader.
void a_forked_child_abandons_background_calls() {
  constexpr unsigned child_deadline_s = 100;
  for (const Transport transport : transports) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      auto ranks = std::make_unique<Ranks>(2, transport);
      Endpoint& endpoint = ranks->endpoint(0);
      auto sums = std::make_unique<Sums>(endpoint, 3, 100000);
      for (std::size_t index = 0; index < 3; ++index) sums->run_in_background(index);
      std::thread first([&] { endpoint.wait(sums->request(0), timeout_s, nullptr); });
      std::thread second([&] { endpoint.wait(sums->request(1), timeout_s, nullptr); });
      std::this_thread::sleep_for(std::chrono::milliseconds(attempt));
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(child_deadline_s);
        for (std::int32_t rank = 0; rank < 2; ++rank) ranks->control(rank).abandon();
        sums.reset();
        ranks.reset();
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      endpoint.close();
      first.join();
      second.join();
      CHECK(child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
}

}  // namespace

int main() {
  return run_tests({
      {"background collectives end without a waiter", background_collectives_end_without_a_waiter},
      {"background messages end without a waiter", background_messages_end_without_a_waiter},
      {"hundreds of queued calls end in their order", hundreds_of_queued_calls_end_in_their_order},
      {"wait for end counts the ended calls", wait_for_end_counts_the_ended_calls},
      {"threads may mix blocking and background calls", threads_may_mix_blocking_and_background_calls},
      {"a waiter takes the lead and gives it back", a_waiter_takes_the_lead_and_gives_it_back},
      {"two threads may wait for one background call", two_threads_may_wait_for_one_background_call},
      {"try now fails while a background call runs", try_now_fails_while_a_background_call_runs},
      {"a background collective times out", a_background_collective_times_out},
      {"a background message times out", a_background_message_times_out},
      {"a background call times out while another thread leads",
       a_background_call_times_out_while_another_thread_leads},
      {"closing ends background calls", closing_ends_background_calls},
      {"calls may be started while another thread closes", calls_may_be_started_while_another_thread_closes},
      {"dropping a background call aborts all ranks", dropping_a_background_call_aborts_all_ranks},
      {"a failure ends background calls", a_failure_ends_background_calls},
      {"a mismatch ends background messages", a_mismatch_ends_background_messages},
      {"a peer that closes ends background calls", a_peer_that_closes_ends_background_calls},
      {"a forked child abandons background calls", a_forked_child_abandons_background_calls},
  });
}
