#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

constexpr double timeout_s = 60;

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t nbytes, std::size_t seed) {
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 + seed);
  return bytes;
}

std::unique_ptr<Request> send(Endpoint& endpoint, std::uint32_t tag, Bytes& data) {
  return endpoint.send(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size(), {});
}

std::unique_ptr<Request> receive(Endpoint& endpoint, std::uint32_t tag, Bytes& data) {
  return endpoint.receive(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size(), {});
}

bool done(Endpoint& endpoint, Request& request) { return endpoint.wait(request, timeout_s, nullptr) == Outcome::done; }

void messages_of_any_length_arrive() {
  const std::size_t lengths[] = {0, 1, 7, 16, 17, 65535, 65536, 65537, 3 << 20};
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      for (const std::size_t nbytes : lengths) {
        Bytes data = rank == 0 ? pattern(nbytes, 1) : Bytes(nbytes);
        const auto request = rank == 0 ? send(endpoint, 0, data) : receive(endpoint, 0, data);
        CHECK(done(endpoint, *request));
        CHECK(data == pattern(nbytes, 1));
      }
    });
  }
}

void both_directions_move_at_once() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      Bytes out = pattern(2 << 20, static_cast<std::size_t>(rank));
      Bytes in(out.size());
      const auto receiving = receive(endpoint, 5, in);
      const auto sending = send(endpoint, 5, out);
      std::thread other([&, &sent = *sending] { endpoint.wait(sent, timeout_s, nullptr); });
      const bool received = done(endpoint, *receiving);
      other.join();
      CHECK(received && endpoint.poll(*sending) == Outcome::done);
      CHECK(in == pattern(in.size(), static_cast<std::size_t>(1 - rank)));
    });
  }
}

void a_receive_takes_the_first_message_of_its_tag() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      const std::uint32_t sent_tags[] = {3, 1, 3, 2};
      const std::uint32_t received_tags[] = {2, 3, 1, 3};
      const std::size_t expected[] = {3, 0, 1, 2};  // in which place it was sent
      for (std::size_t i = 0; i < 4; ++i) {
        Bytes data = rank == 0 ? pattern(1000, i) : Bytes(1000);
        const auto request = rank == 0 ? send(endpoint, sent_tags[i], data) : receive(endpoint, received_tags[i], data);
        CHECK(done(endpoint, *request));
        CHECK(rank == 0 || data == pattern(1000, expected[i]));
      }
    });
  }
}

// Fails both: the receive that is posted when the message comes, and the one that finds it put aside.
void a_message_of_another_length_is_a_mismatch() {
  for (const Transport transport : transports) {
    for (const bool aside : {false, true}) {
      Ranks ranks(2, transport);
      Bytes first = pattern(100, 0);
      Bytes second = pattern(50, 0);
      const auto a = send(ranks.endpoint(0), 1, first);
      const auto b = send(ranks.endpoint(0), 2, second);
      CHECK(done(ranks.endpoint(0), *a) && done(ranks.endpoint(0), *b));
      Endpoint& receiver = ranks.endpoint(1);
      Bytes room(50);
      if (aside) CHECK(done(receiver, *receive(receiver, 2, room)));
      const auto wrong = receive(receiver, 1, room);
      CHECK(receiver.wait(*wrong, timeout_s, nullptr) == Outcome::failed);
      CHECK(receiver.control().failure().kind == FailureKind::mismatch);
      CHECK(receiver.control().failure().text.find("uint8[100]") != std::string::npos);
    }
  }
}

void a_peer_that_cannot_be_leaves_the_endpoint_usable() {
  Ranks ranks(2, Transport::shm);
  Bytes data(1);
  Endpoint& endpoint = ranks.endpoint(0);
  CHECK(throws<std::invalid_argument>([&] { endpoint.send(9, DType::uint8, 0, data.data(), 1, {}); }));
  CHECK(!endpoint.control().failed());
  const auto request = send(endpoint, 0, data);
  CHECK(done(endpoint, *request));
}

void closing_ends_a_receive_that_another_thread_waits_for() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Bytes data(100);
    Endpoint& endpoint = ranks.endpoint(0);
    const auto waited = receive(endpoint, 0, data);
    const auto polled = receive(endpoint, 1, data);
    std::thread closer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      endpoint.close();
    });
    CHECK(endpoint.wait(*waited, timeout_s, nullptr) == Outcome::failed);
    closer.join();
    CHECK(endpoint.poll(*polled) == Outcome::failed);
  }
}

void a_receive_times_out_naming_its_peer() {
  Ranks ranks(2, Transport::tcp);
  Bytes data(1);
  const auto request = receive(ranks.endpoint(0), 0, data);
  CHECK(ranks.endpoint(0).wait(*request, 0.1, nullptr) == Outcome::failed);
  CHECK(ranks.control(0).failure().kind == FailureKind::timeout && ranks.control(0).failure().peer == 1);
  CHECK(eventually([&] { return ranks.control(1).failed(); }));
}

void a_receive_from_a_rank_that_left_fails() {
  Ranks ranks(2, Transport::shm);
  Bytes data(1);
  const auto request = receive(ranks.endpoint(1), 0, data);
  ranks.endpoint(0).close();
  ranks.control(0).leave("finished");
  CHECK(ranks.endpoint(1).wait(*request, timeout_s, nullptr) == Outcome::failed);
  CHECK(ranks.control(1).failure().kind == FailureKind::peer_lost);
  CHECK(ranks.control(1).failure().text.find("finished") != std::string::npos);
}

}  // namespace

int main() {
  return run_tests({
      {"messages of any length arrive", messages_of_any_length_arrive},
      {"both directions move at once", both_directions_move_at_once},
      {"a receive takes the first message of its tag", a_receive_takes_the_first_message_of_its_tag},
      {"a message of another length is a mismatch", a_message_of_another_length_is_a_mismatch},
      {"a peer that cannot be leaves the endpoint usable", a_peer_that_cannot_be_leaves_the_endpoint_usable},
      {"closing ends a receive that another thread waits for", closing_ends_a_receive_that_another_thread_waits_for},
      {"a receive times out naming its peer", a_receive_times_out_naming_its_peer},
      {"a receive from a rank that left fails", a_receive_from_a_rank_that_left_fails},
  });
}
