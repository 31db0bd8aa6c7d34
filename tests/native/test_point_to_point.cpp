#include <algorithm>
#include <chrono>
#include <optional>
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
  return endpoint.start(Message::to_send(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size()), {});
}

std::unique_ptr<Request> receive(Endpoint& endpoint, std::uint32_t tag, Bytes& data) {
  return endpoint.start(Message::to_receive(1 - endpoint.rank(), DType::uint8, tag, data.data(), data.size()), {});
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
      const std::size_t expected[] = {3, 0, 1, 2};  // the order in which they were sent
      for (std::size_t i = 0; i < 4; ++i) {
        Bytes data = rank == 0 ? pattern(1000, i) : Bytes(1000);
        const auto request = rank == 0 ? send(endpoint, sent_tags[i], data) : receive(endpoint, received_tags[i], data);
        CHECK(done(endpoint, *request));
        CHECK(rank == 0 || data == pattern(1000, expected[i]));
      }
    });
  }
}

// A receive into GPU memory by a channel that cannot write there. `is_late`: the message was buffered before its
// receive was posted. Otherwise it arrives afterwards.
void a_message_that_cannot_be_received_in_place_stays_on_the_host() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      for (const std::size_t nbytes : {std::size_t{5}, std::size_t{3 << 20}}) {
        Bytes data = rank == 0 ? pattern(nbytes, 4) : Bytes(nbytes);
        Bytes behind(1);
        for (const bool is_late : {true, false}) {
          if (rank == 0) {
            const auto first = send(endpoint, 2, data);
            const auto second = send(endpoint, 1, behind);
            CHECK(done(endpoint, *first) && done(endpoint, *second));
            continue;
          }
          if (is_late) CHECK(done(endpoint, *receive(endpoint, 1, behind)));
          const auto request =
              endpoint.start(Message::to_receive(0, DType::uint8, 2, data.data(), nbytes, MemoryType::cuda), {});
          CHECK(done(endpoint, *request));
          CHECK(data == Bytes(nbytes));
          CHECK(Bytes(request->host_copy().begin(), request->host_copy().end()) == pattern(nbytes, 4));
          if (!is_late) CHECK(done(endpoint, *receive(endpoint, 1, behind)));
        }
      }
    });
  }
}

void a_message_of_another_length_is_a_mismatch() {
  for (const Transport transport : transports) {
    for (const bool buffered : {false, true}) {
      Ranks ranks(2, transport);
      Bytes first = pattern(100, 0);
      Bytes second = pattern(50, 0);
      const auto a = send(ranks.endpoint(0), 1, first);
      const auto b = send(ranks.endpoint(0), 2, second);
      CHECK(done(ranks.endpoint(0), *a) && done(ranks.endpoint(0), *b));
      Endpoint& receiver = ranks.endpoint(1);
      Bytes room(50);
      if (buffered) CHECK(done(receiver, *receive(receiver, 2, room)));
      const auto wrong = receive(receiver, 1, room);
      CHECK(receiver.wait(*wrong, timeout_s, nullptr) == Outcome::failed);
      CHECK(receiver.control().failure().kind == FailureKind::mismatch);
      CHECK(receiver.control().failure().text.find("uint8[100]") != std::string::npos);
    }
  }
}

// A hostile peer may put any number of an element type into a header.
void a_number_of_no_element_type_is_an_error_of_the_receiver() {
  for (const std::uint32_t number : {17U, 1U << 29, 1U << 31, ~0U, ElementType::bytes_bit | 0x1234}) {
    for (const bool takes : {false, true}) {
      Ranks ranks(2, Transport::shm);
      Bytes data(8);
      Endpoint& receiver = ranks.endpoint(1);
      const Message sent = Message::to_send(1, ElementType(number), 1, data.data(), data.size());
      const auto sending = ranks.endpoint(0).start(sent, {});
      CHECK(done(ranks.endpoint(0), *sending));
      const auto request =
          takes ? receiver.start(Message::to_probe(0, 1, false, true), {}) : receive(receiver, 1, data);
      const bool is_valid = ElementType(number).is_valid();
      CHECK(done(receiver, *request) == (takes && is_valid));
      if (takes && is_valid) continue;
      CHECK(receiver.control().failure().kind == (is_valid ? FailureKind::mismatch : FailureKind::internal));
      const std::string text = is_valid ? "bytes of a dtype unknown here[8]" : "no known type";
      CHECK(receiver.control().failure().text.find(text) != std::string::npos);
    }
  }
}

void try_now_ends_a_message_at_once_if_possible() {
  Ranks ranks(2, Transport::shm);
  Endpoint& sender = ranks.endpoint(0);
  Endpoint& receiver = ranks.endpoint(1);
  Bytes data = pattern(100, 1);
  Bytes room(100);
  const Message to_receive = Message::to_receive(0, DType::uint8, 3, room.data(), room.size());
  CHECK(sender.reaches(1));
  for (const bool expected : {false, true}) {
    std::unique_ptr<Request> early = expected ? receiver.try_now(to_receive, {}, 1) : nullptr;
    CHECK(!expected || early->outcome() == Outcome::pending);
    const auto sending = sender.try_now(Message::to_send(1, DType::uint8, 3, data.data(), data.size()), {}, 1);
    CHECK(sending->outcome() == Outcome::done);
    if (!expected) early = receiver.try_now(to_receive, {}, 1);
    CHECK(done(receiver, *early) && early->matched()->source == 0 && room == data);
    room.assign(100, std::byte{});
  }
}

// A message with the wrong length stays pending until a thread waits for it, which then reports the mismatch.
void try_now_starts_no_message_behind_another_one_or_a_failure() {
  Ranks ranks(2, Transport::shm);
  Endpoint& receiver = ranks.endpoint(1);
  Bytes data(50);
  const auto first = receive(receiver, 1, data);
  CHECK(receiver.try_now(Message::to_receive(0, DType::uint8, 1, data.data(), 50), {}, 1) == nullptr);
  Bytes longer = pattern(100, 1);
  CHECK(done(ranks.endpoint(0), *send(ranks.endpoint(0), 2, longer)));
  CHECK(receiver.poll(*first) == Outcome::pending);
  const auto wrong = receiver.try_now(Message::to_receive(0, DType::uint8, 2, data.data(), 50), {}, 50);
  CHECK(wrong != nullptr && wrong->outcome() == Outcome::pending);
  CHECK(receiver.wait(*wrong, timeout_s, nullptr) == Outcome::failed);
  CHECK(receiver.control().failure().kind == FailureKind::mismatch);
  CHECK(receiver.try_now(Message::to_receive(0, DType::uint8, 2, data.data(), 50), {}, 1) == nullptr);
}

void an_invalid_peer_leaves_the_endpoint_usable() {
  Ranks ranks(2, Transport::shm);
  Bytes data(1);
  Endpoint& endpoint = ranks.endpoint(0);
  CHECK(
      throws<std::invalid_argument>([&] { endpoint.start(Message::to_send(9, DType::uint8, 0, data.data(), 1), {}); }));
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

void a_receive_from_a_departed_rank_fails() {
  Ranks ranks(2, Transport::shm);
  Bytes data(1);
  const auto request = receive(ranks.endpoint(1), 0, data);
  ranks.endpoint(0).close();
  ranks.control(0).leave("finished");
  CHECK(ranks.endpoint(1).wait(*request, timeout_s, nullptr) == Outcome::failed);
  CHECK(ranks.control(1).failure().kind == FailureKind::peer_lost);
  CHECK(ranks.control(1).failure().text.find("finished") != std::string::npos);
}

std::unique_ptr<Request> receive_any(Endpoint& endpoint, Bytes& data, std::optional<std::uint32_t> tag = {}) {
  return endpoint.start(Message::to_receive({}, DType::uint8, tag, data.data(), data.size()), {});
}

std::optional<MatchedMessage> probed(Endpoint& endpoint, std::optional<std::int32_t> source,
                                     std::optional<std::uint32_t> tag, bool once) {
  const auto request = endpoint.start(Message::to_probe(source, tag, once), {});
  CHECK(done(endpoint, *request));
  return request->matched();
}

bool is_from(const Request& request, std::int32_t source, std::uint32_t tag) {
  return request.matched() && request.matched()->source == source && request.matched()->header.group == tag;
}

void a_receive_from_any_rank_gets_messages_of_all() {
  for (const Transport transport : transports) {
    Ranks ranks(3, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      for (const std::size_t nbytes : {0, 1, 17, 3 << 20}) {
        const auto tag = static_cast<std::uint32_t>(nbytes);  // tells the rounds apart, because one sender may be ahead
        Bytes data = rank == 0 ? Bytes(nbytes) : pattern(nbytes, static_cast<std::size_t>(rank));
        if (rank != 0) {
          CHECK(done(endpoint, *endpoint.start(Message::to_send(0, DType::uint8, tag, data.data(), nbytes), {})));
          continue;
        }
        std::vector<int> seen(3);
        for (int i = 0; i < 2; ++i) {
          const auto request = receive_any(endpoint, data, tag);
          CHECK(done(endpoint, *request) && request->matched());
          const auto source = static_cast<std::size_t>(request->matched()->source);
          CHECK(request->matched()->header.group == tag && ++seen[source] == 1);
          CHECK(data == pattern(nbytes, source));
        }
      }
    });
  }
}

void receives_from_any_and_from_one_rank_match_in_posted_order() {
  for (const Transport transport : transports) {
    Ranks ranks(3, transport);
    Bytes data = pattern(100, 1);
    std::vector<Bytes> rooms(4, Bytes(100));
    Endpoint& receiver = ranks.endpoint(0);
    const auto first = receiver.start(Message::to_receive(2, DType::uint8, 5, rooms[0].data(), 100), {});
    const auto second = receive_any(receiver, rooms[1], 5);
    const auto third = receiver.start(Message::to_receive(2, DType::uint8, 5, rooms[2].data(), 100), {});
    const auto fourth = receive_any(receiver, rooms[3]);
    for (const std::int32_t source : {2, 2, 2, 1}) {
      Endpoint& sender = ranks.endpoint(source);
      CHECK(done(sender, *sender.start(Message::to_send(0, DType::uint8, 5, data.data(), 100), {})));
      if (source == 2) continue;
      CHECK(done(receiver, *fourth));
    }
    for (const auto* request : {&first, &second, &third}) CHECK(done(receiver, **request));
    // The two receives from rank 2 have a message each. Of the two receives from any rank, one has the third message of
    // rank 2, and the other one the message of rank 1.
    CHECK(is_from(*first, 2, 5) && is_from(*third, 2, 5));
    CHECK(second->matched()->source + fourth->matched()->source == 3);
  }
}

void a_receive_of_any_tag_skips_reserved_tags() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Bytes data = pattern(10, 3);
    Endpoint& sender = ranks.endpoint(1);
    Endpoint& receiver = ranks.endpoint(0);
    for (const std::uint32_t tag : {first_reserved_tag, first_reserved_tag - 1})
      CHECK(done(sender, *send(sender, tag, data)));
    Bytes room(10);
    const auto any = receive_any(receiver, room);
    CHECK(done(receiver, *any) && is_from(*any, 1, first_reserved_tag - 1));
    CHECK(!probed(receiver, {}, {}, true));
    CHECK(done(receiver, *receive(receiver, first_reserved_tag, room)));
  }
}

void a_receive_of_any_object_skips_arrays_and_tags_inside_calls() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Bytes data = pattern(10, 3);
    Endpoint& sender = ranks.endpoint(1);
    Endpoint& receiver = ranks.endpoint(0);
    for (const std::uint32_t tag : {5U, any_object_tag, ~0U, any_object_tag - 1, first_reserved_tag})
      CHECK(done(sender, *send(sender, tag, data)));
    Bytes room(10);
    for (const std::uint32_t tag : {any_object_tag - 1, first_reserved_tag}) {
      const auto any = receive(receiver, any_object_tag, room);
      CHECK(done(receiver, *any) && is_from(*any, 1, tag));
    }
    CHECK(!probed(receiver, {}, any_object_tag, true));
  }
}

void a_probe_does_not_consume_the_message() {
  for (const Transport transport : transports) {
    Ranks ranks(3, transport);
    Endpoint& receiver = ranks.endpoint(0);
    CHECK(!probed(receiver, {}, {}, true) && !probed(receiver, 1, 4, true));
    Bytes data = pattern(100000, 3);
    Endpoint& sender = ranks.endpoint(2);
    std::thread sends([&] {
      CHECK(done(sender, *sender.start(Message::to_send(0, DType::float32, 6, data.data(), 8), {})));
      CHECK(done(sender, *sender.start(Message::to_send(0, DType::uint8, 4, data.data(), data.size()), {})));
    });
    for (int round = 0; round < 2; ++round) {
      const auto found = probed(receiver, {}, 4, false);
      CHECK(found && found->source == 2 && found->header.group == 4 && found->header.nbytes == data.size());
    }
    const auto first = probed(receiver, 2, {}, true);
    CHECK(first && first->header.group == 6 && first->header.nbytes == 8);
    CHECK(first->header.sequence == static_cast<std::uint32_t>(DType::float32));
    CHECK(!probed(receiver, 1, {}, true));
    Bytes room(100000);
    CHECK(done(receiver, *receive_any(receiver, room, 4)) && room == data);
    sends.join();
    CHECK(!probed(receiver, {}, 4, true));
  }
}

void a_mismatched_receive_from_any_rank_fails() {
  for (const bool buffered : {false, true}) {
    Ranks ranks(3, Transport::shm);
    Bytes data = pattern(100, 0);
    Endpoint& sender = ranks.endpoint(2);
    Endpoint& receiver = ranks.endpoint(0);
    CHECK(done(sender, *sender.start(Message::to_send(0, DType::uint8, 1, data.data(), 100), {})));
    if (buffered) CHECK(!probed(receiver, {}, 9, true));
    Bytes room(50);
    const auto wrong = receive_any(receiver, room);
    CHECK(receiver.wait(*wrong, timeout_s, nullptr) == Outcome::failed);
    CHECK(receiver.control().failure().kind == FailureKind::mismatch && receiver.control().failure().peer == 2);
    CHECK(receiver.wait(*receive_any(receiver, room), timeout_s, nullptr) == Outcome::failed);
  }
}

void a_receive_from_any_rank_fails_when_all_have_departed() {
  for (const bool probes : {false, true}) {
    Ranks ranks(3, Transport::shm);
    Bytes data(1);
    Endpoint& endpoint = ranks.endpoint(0);
    CHECK(done(ranks.endpoint(1), *ranks.endpoint(1).start(Message::to_send(0, DType::uint8, 3, data.data(), 1), {})));
    ranks.endpoint(1).close();
    ranks.control(1).leave("finished");
    CHECK(done(endpoint, *receive_any(endpoint, data)));
    CHECK(!probed(endpoint, {}, {}, true));
    const auto request = probes ? endpoint.start(Message::to_probe({}, 4, true), {}) : receive_any(endpoint, data);
    ranks.endpoint(2).close();
    ranks.control(2).leave("finished too");
    if (probes) {
      // The probe looks only once. So it has ended before the departures, or it fails as all later calls do.
      endpoint.wait(*request, timeout_s, nullptr);
      CHECK(eventually([&] {
        const auto again = endpoint.start(Message::to_probe({}, 4, true), {});
        return endpoint.wait(*again, timeout_s, nullptr) == Outcome::failed;
      }));
    } else {
      CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::failed);
    }
    CHECK(endpoint.control().failure().kind == FailureKind::peer_lost);
  }
}

void a_receive_from_any_rank_times_out() {
  Ranks ranks(2, Transport::tcp);
  Bytes data(1);
  const auto request = receive_any(ranks.endpoint(0), data);
  CHECK(ranks.endpoint(0).wait(*request, 0.1, nullptr) == Outcome::failed);
  CHECK(ranks.control(0).failure().kind == FailureKind::timeout);
  CHECK(ranks.control(0).failure().text.find("any rank") != std::string::npos);
}

// Threads of a rank send to the rank itself what others receive, by rank and from any, beside messages of the peer.
void threads_of_a_rank_send_to_it() {
  constexpr std::size_t rounds = 50;
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      const auto send_all = [&](std::uint32_t tag, std::int32_t peer) {
        for (std::size_t i = 0; i < rounds; ++i) {
          Bytes data = pattern(i % 5 == 0 ? SelfQueue::buffer_nbytes : i * 100, i);
          const auto request = endpoint.start(Message::to_send(peer, DType::uint8, tag, data.data(), data.size()), {});
          CHECK(done(endpoint, *request));
        }
      };
      const auto receive_all = [&](std::uint32_t tag, std::optional<std::int32_t> peer) {
        for (std::size_t i = 0; i < rounds; ++i) {
          Bytes data(i % 5 == 0 ? SelfQueue::buffer_nbytes : i * 100);
          const auto request =
              endpoint.start(Message::to_receive(peer, DType::uint8, tag, data.data(), data.size()), {});
          CHECK(done(endpoint, *request));
          CHECK(data == pattern(data.size(), i));
        }
      };
      std::thread own([&] { send_all(1, rank); });
      std::thread of_peer([&] { send_all(2, 1 - rank); });
      std::thread any([&] { receive_all(1, std::nullopt); });
      receive_all(2, 1 - rank);
      own.join(), of_peer.join(), any.join();
      CHECK(endpoint.takes_from_itself(3, SelfQueue::buffer_nbytes - SelfQueue::nbytes_per_message));
      CHECK(!endpoint.takes_from_itself(3, SelfQueue::buffer_nbytes));
    });
  }
}

// Both ranks send synchronously, to each other and to themselves, and receive the messages backwards: every third one
// takes its message and acknowledges it at the end. Each send ends, and none before its message is received.
void synchronous_sends_end_with_their_receives() {
  constexpr std::uint32_t count = 30;
  const std::size_t lengths[] = {0, 9, 70'000, 3 << 20};
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      std::vector<Bytes> sent, received;
      std::vector<std::unique_ptr<Request>> sends, receives, taken, acknowledgements;
      for (std::uint32_t i = 0; i < 2 * count; ++i) {
        sent.push_back(pattern(lengths[i % std::size(lengths)], i));
        received.emplace_back(sent.back().size());
      }
      for (std::uint32_t i = 0; i < 2 * count; ++i) {
        const std::int32_t peer = i < count ? rank : 1 - rank;
        sends.push_back(endpoint.start(Message::to_send(peer, DType::uint8, i, sent[i].data(), sent[i].size(),
                                                        MemoryType::host, 0, endpoint.number_of_synchronous()),
                                       {}));
        endpoint.run_in_background(*sends.back(), timeout_s);
      }
      for (std::uint32_t i = 2 * count; i-- > 0;) {
        CHECK(sends[i]->outcome() == Outcome::pending || i >= count);
        const std::int32_t peer = i < count ? rank : 1 - rank;
        if (i % 3 == 0) {
          taken.push_back(endpoint.start(Message::to_probe(peer, i, false, true), {}));
          CHECK(done(endpoint, *taken.back()));
          CHECK(std::ranges::equal(taken.back()->host_copy(), pattern(sent[i].size(), i)));
          continue;
        }
        receives.push_back(
            endpoint.start(Message::to_receive(peer, DType::uint8, i, received[i].data(), received[i].size()), {}));
        CHECK(done(endpoint, *receives.back()));
        CHECK(received[i] == pattern(received[i].size(), i));
      }
      for (const auto& request : taken) {
        const auto& number = request->matched()->header.segment;
        CHECK(number != 0);
        acknowledgements.push_back(endpoint.start(Message::to_acknowledge(*request->matched()), {}));
        CHECK(done(endpoint, *acknowledgements.back()));
      }
      for (const auto& request : sends) CHECK(done(endpoint, *request));
    });
  }
}

// A send whose memory the queue refers to leaves it when the communicator ends.
void an_own_message_that_nobody_receives_ends_with_the_endpoint() {
  Ranks ranks(1, transports[0]);
  ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
    Bytes data = pattern(2 * SelfQueue::buffer_nbytes, 0);
    const auto request = endpoint.start(Message::to_send(rank, DType::uint8, 0, data.data(), data.size()), {});
    const auto synchronous = endpoint.start(
        Message::to_send(rank, DType::uint8, 1, data.data(), 1, MemoryType::host, 0, endpoint.number_of_synchronous()),
        {});
    CHECK(endpoint.wait(*request, 0.05, nullptr) == Outcome::failed);
    endpoint.close();
    CHECK(endpoint.poll(*request) == Outcome::failed);
    CHECK(endpoint.poll(*synchronous) == Outcome::failed);
  });
}

}  // namespace

int main() {
  return run_tests({
      {"messages of any length arrive", messages_of_any_length_arrive},
      {"both directions move at once", both_directions_move_at_once},
      {"a receive takes the first message of its tag", a_receive_takes_the_first_message_of_its_tag},
      {"a message that cannot be received in place stays on the host",
       a_message_that_cannot_be_received_in_place_stays_on_the_host},
      {"a message of another length is a mismatch", a_message_of_another_length_is_a_mismatch},
      {"a number of no element type is an error of the receiver",
       a_number_of_no_element_type_is_an_error_of_the_receiver},
      {"try now ends a message at once if possible", try_now_ends_a_message_at_once_if_possible},
      {"try now starts no message behind another one or a failure",
       try_now_starts_no_message_behind_another_one_or_a_failure},
      {"an invalid peer leaves the endpoint usable", an_invalid_peer_leaves_the_endpoint_usable},
      {"closing ends a receive that another thread waits for", closing_ends_a_receive_that_another_thread_waits_for},
      {"a receive times out naming its peer", a_receive_times_out_naming_its_peer},
      {"a receive from a departed rank fails", a_receive_from_a_departed_rank_fails},
      {"a receive from any rank gets messages of all", a_receive_from_any_rank_gets_messages_of_all},
      {"receives from any and from one rank match in posted order",
       receives_from_any_and_from_one_rank_match_in_posted_order},
      {"a receive of any tag skips reserved tags", a_receive_of_any_tag_skips_reserved_tags},
      {"a receive of any object skips arrays and tags inside calls",
       a_receive_of_any_object_skips_arrays_and_tags_inside_calls},
      {"a probe does not consume the message", a_probe_does_not_consume_the_message},
      {"a mismatched receive from any rank fails", a_mismatched_receive_from_any_rank_fails},
      {"a receive from any rank fails when all have departed", a_receive_from_any_rank_fails_when_all_have_departed},
      {"a receive from any rank times out", a_receive_from_any_rank_times_out},
      {"threads of a rank send to it", threads_of_a_rank_send_to_it},
      {"synchronous sends end with their receives", synchronous_sends_end_with_their_receives},
      {"an own message that nobody receives ends with the endpoint",
       an_own_message_that_nobody_receives_ends_with_the_endpoint},
  });
}
