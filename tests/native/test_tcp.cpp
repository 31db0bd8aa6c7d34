#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "breaking_connections.h"
#include "check.h"
#include "drain.h"
#include "ranks.h"
#include "tcp/crc32c.h"
#include "tcp/tcp_channel.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t block_nbytes = 256 << 10;

Header header_of(std::size_t nbytes) { return {11, nbytes, 22, 44, 33, kind_collective}; }

std::unique_ptr<TcpChannel> open(Descriptor socket, const TcpTerms& terms) {
  std::vector<Connection> sockets;
  sockets.push_back(std::move(socket));
  return std::make_unique<TcpChannel>(1, std::move(sockets), terms);
}

// Returns the bytes that a channel puts on the wire for messages of these lengths.
Bytes wire_bytes(const std::vector<std::size_t>& lengths, const TcpTerms& terms) {
  SocketPair sockets = unix_pair();
  const auto sender = open(std::move(sockets.a), terms);
  Bytes bytes(1 << 20);
  std::size_t got = 0;
  const auto drain = [&] {
    const auto part = ::recv(sockets.b.get(), bytes.data() + got, bytes.size() - got, MSG_DONTWAIT);
    if (part > 0) got += static_cast<std::size_t>(part);
    return part > 0;
  };
  for (const std::size_t nbytes : lengths) {
    const Bytes payload(nbytes, std::byte{9});
    CHECK(sender->begin(header_of(nbytes)));
    for (std::size_t sent = 0; sent < nbytes; drain()) sent += sender->write(payload.data() + sent, nbytes - sent);
    CHECK(eventually([&] { return drain(), sender->flush(); }));
  }
  while (drain()) {
  }
  bytes.resize(got);
  return bytes;
}

// Passes `bytes` to a channel; false if it refuses them, or demands them again.
bool accepts(const Bytes& bytes, const TcpTerms& terms) {
  SocketPair sockets = unix_pair();
  const auto channel = open(std::move(sockets.b), terms);
  Drain drain(*channel);
  for (std::size_t sent = 0; sent < bytes.size();) {
    const auto part = ::send(sockets.a.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (part > 0) sent += static_cast<std::size_t>(part);
    if (!drain.run() || !channel->broken().empty()) return false;
  }
  return drain.run() && channel->broken().empty();
}

std::vector<std::size_t> some_lengths(Dice& dice) {
  std::vector<std::size_t> lengths(1 + dice.below(4));
  for (std::size_t& nbytes : lengths) nbytes = dice.below(2000);
  return lengths;
}

void mutate(Bytes& bytes, Dice& dice) {
  for (std::size_t i = dice.below(4); i > 0; --i) bytes[dice.below(bytes.size())] ^= std::byte{1} << dice.below(8);
  if (dice.below(3) == 0) bytes.resize(1 + dice.below(bytes.size()));
  if (dice.below(5) == 0)
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.word());
}

void damaged_bytes_are_refused_or_end() {
  Dice dice(8);
  int refused = 0;
  for (int round = 0; round < 1000; ++round) {
    const TcpTerms terms{0, dice.below(2) == 0};
    Bytes bytes = wire_bytes(some_lengths(dice), terms);
    mutate(bytes, dice);
    SocketPair sockets = unix_pair();
    const auto channel = open(std::move(sockets.b), terms);
    Drain drain(*channel);
    bool whole = true;
    for (std::size_t sent = 0; sent < bytes.size() && whole;) {
      const std::size_t part = std::min(bytes.size() - sent, 1 + dice.below(700));
      CHECK(::send(sockets.a.get(), bytes.data() + sent, part, MSG_NOSIGNAL) == static_cast<ssize_t>(part));
      sent += part;
      whole = drain.run() && channel->broken().empty();
    }
    sockets.a.reset();
    refused += !whole;
    CHECK(!whole || channel->front() != nullptr || channel->closed());
  }
  CHECK(refused > 150);
}

void every_flipped_bit_of_a_header_is_detected() {
  const Bytes good = wire_bytes({100}, {});
  CHECK(accepts(good, {}));
  for (std::size_t bit = 0; bit < 64 * 8; ++bit) {
    Bytes bytes(good.begin(), good.begin() + 64);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(!accepts(bytes, {}));
  }
}

void any_flipped_bit_of_a_checked_payload_is_detected() {
  Dice dice(11);
  const TcpTerms terms{0, true};
  const Bytes good = wire_bytes({2 * block_nbytes + 1000, 3000}, terms);
  CHECK(accepts(good, terms));
  CHECK(accepts(good, {}));  // the sender decides whether there are checksums
  for (int round = 0; round < 100; ++round) {
    Bytes bytes = good;
    bytes[dice.below(bytes.size())] ^= std::byte{1} << dice.below(8);
    CHECK(!accepts(bytes, terms));
  }
}

void no_byte_of_a_damaged_block_is_delivered() {
  const TcpTerms terms{0, true};
  Bytes bytes = wire_bytes({block_nbytes}, terms);
  bytes[bytes.size() / 2] ^= std::byte{1};
  SocketPair sockets = unix_pair();
  const auto channel = open(std::move(sockets.b), terms);
  Bytes got(block_nbytes);
  std::size_t sent = 0;
  const auto demanded_again = [&] {
    const auto part = ::send(sockets.a.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (part > 0) sent += static_cast<std::size_t>(part);
    if (channel->front() != nullptr) CHECK(channel->read(got.data(), got.size()) == 0);
    return !channel->broken().empty();
  };
  CHECK(eventually(demanded_again));
  CHECK(channel->retire({0, 0})->received == 64);  // the header, and nothing of the block
  CHECK(::send(sockets.a.get(), bytes.data(), 1, MSG_NOSIGNAL) < 0);
}

void a_block_that_is_damaged_twice_is_refused() {
  const TcpTerms terms{0, true};
  Bytes bytes = wire_bytes({1000}, terms);
  bytes[500] ^= std::byte{1};
  SocketPair sockets = unix_pair();
  const auto channel = open(std::move(sockets.b), terms);
  Drain drain(*channel);
  CHECK(::send(sockets.a.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(drain.run() && !channel->broken().empty());
  SocketPair others = unix_pair();
  CHECK(channel->retire({0, 0})->received == 64 && channel->resume(0, std::move(others.b), {1, 0}));
  CHECK(::send(others.a.get(), bytes.data() + 64, bytes.size() - 64, 0) == static_cast<ssize_t>(bytes.size() - 64));
  CHECK(!drain.run());
}

void channels_deliver_every_byte_however_often_their_connections_break() {
  pass_messages_over_breaking_connections([] { return unencrypted(unix_pair()); });
}

void a_stream_that_lacks_lost_bytes_does_not_go_on() {
  SocketPair sockets = unix_pair();
  const auto channel = open(std::move(sockets.a), {});
  const Bytes payload(100'000);
  CHECK(channel->begin(header_of(payload.size())) && channel->write(payload.data(), payload.size()) == payload.size());
  Bytes got(payload.size() + 64);
  CHECK(::recv(sockets.b.get(), got.data(), got.size(), MSG_WAITALL) == static_cast<ssize_t>(got.size()));
  CHECK(channel->begin(header_of(payload.size())) && channel->write(payload.data(), payload.size()) == payload.size());
  CHECK(channel->retire({0, 0})->received == 0 && !channel->retire({1, 0}));
  SocketPair others = unix_pair();
  CHECK(!channel->resume(0, std::move(others.a), {1, 1000}));  // as if a proxy had lost the rest
  CHECK(!channel->resume(0, unix_pair().a, {1, 1'000'000}));   // more than was sent
  CHECK(!channel->broken().empty());
  others = unix_pair();
  CHECK(channel->resume(0, std::move(others.a), {1, got.size()}) && channel->broken().empty());
  CHECK(!channel->retire({0, 0}));  // about the former connection
}

void messages_of_another_epoch_and_out_of_order_are_refused() {
  const Bytes old = wire_bytes({10}, {4, false});
  CHECK(accepts(old, {4, false}) && !accepts(old, {5, false}));
  const Bytes three = wire_bytes({0, 0, 0}, {});
  CHECK(three.size() == 192 && accepts(three, {}));
  Bytes without_second = three;
  without_second.erase(without_second.begin() + 64, without_second.begin() + 128);
  CHECK(!accepts(without_second, {}));
  Bytes twice = three;
  twice.insert(twice.begin(), three.begin(), three.begin() + 64);
  CHECK(!accepts(twice, {}));
}

std::string congestion_control(int socket) {
  char name[16] = {};
  socklen_t nbytes = sizeof name;
  CHECK(::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0);
  return name;
}

// Returns the congestion control of a channel between two addresses with short round trips, on whose socket `name` was
// set before.
std::string congestion_control_after(const char* name) {
  SocketPair sockets = tcp_pair("127.0.0.2");
  const int socket = sockets.a.get();
  if (::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) != 0)
    return "";
  const auto channel = open(std::move(sockets.a), {});
  return congestion_control(socket);
}

void channels_over_short_round_trips_do_without_bbr() {
  CHECK(congestion_control_after("reno") == "reno");
  const std::string after_bbr = congestion_control_after("bbr");  // empty if the kernel does not have or allow it
  CHECK(after_bbr.empty() || after_bbr == "reno");
  const std::string after_cubic = congestion_control_after("cubic");
  CHECK(after_cubic.empty() || after_cubic == "cubic");
}

void a_channel_has_at_least_one_stream() {
  CHECK(throws<std::invalid_argument>([] { TcpChannel(1, {}, {}); }));
  CHECK(throws<std::invalid_argument>([] { TcpChannel(1, std::vector<Connection>(17), {}); }));
}

// Returns, for 100 receives of a message, whether the policy chose the stage, if direct and staged receives take these
// times.
std::vector<bool> staged_receives(ReceivePolicy& policy, std::chrono::nanoseconds direct,
                                  std::chrono::nanoseconds staged) {
  std::vector<bool> choices;
  policy.begin_message(1 << 20);
  for (int i = 0; i < 100; ++i) {
    choices.push_back(policy.is_staged());
    policy.note(choices.back(), choices.back() ? staged : direct, policy.most(ReceivePolicy::first_nbytes));
  }
  return choices;
}

void slow_receives_go_through_the_stage() {
  using std::chrono::microseconds;
  ReceivePolicy policy;
  policy.begin_message(1 << 20);
  CHECK(policy.most(1 << 20) == ReceivePolicy::first_nbytes && policy.most(1000) == 1000);
  const auto slow = staged_receives(policy, microseconds(20), microseconds(10));
  CHECK(!slow[0] && std::count(slow.begin(), slow.end(), true) == 99);
  CHECK(policy.most(1 << 20) == 1 << 20);
  const auto quick = staged_receives(policy, microseconds(5), microseconds(10));
  CHECK(std::count(quick.begin(), quick.end(), true) == 1);  // a trial
  const auto alike = staged_receives(policy, microseconds(10), microseconds(9));
  CHECK(std::count(alike.begin(), alike.end(), true) <= 2);
  policy.begin_message(2 * ReceivePolicy::first_nbytes);
  policy.note(false, microseconds(20), ReceivePolicy::first_nbytes);
  CHECK(!policy.is_staged());  // too little of the message remains to use the stage
}

void a_stage_changes_its_offset_in_a_line_after_slow_receives() {
  using std::chrono::microseconds;
  StagingPolicy policy;
  const auto offset_after = [&](int us) {
    return policy.note(microseconds(us), ReceivePolicy::first_nbytes), policy.line_offset();
  };
  CHECK(policy.line_offset() == 0 && offset_after(10) == 0 && offset_after(12) == 0);
  CHECK(offset_after(30) == 32 && offset_after(10) == 32 && offset_after(30) == 0);
  policy.note(microseconds(30), 1000);  // too short to count
  CHECK(policy.line_offset() == 0);
  int moved = 0;
  for (int i = 0; i < 100; ++i) {
    const std::size_t before = policy.line_offset();
    moved += offset_after(30) != before;
  }
  CHECK(0 < moved && moved < 30);  // the stage stays once every offset has taken as long
}

void a_long_message_arrives_whole_in_direct_and_staged_parts() {
  Dice dice(5);
  SocketPair sockets = unix_pair();
  const auto sender = open(std::move(sockets.a), {});
  const auto receiver = open(std::move(sockets.b), {});
  for (const std::size_t from : {0, 1, 16, 40}) {
    Bytes payload(3 * block_nbytes + 17);
    for (std::byte& byte : payload) byte = static_cast<std::byte>(dice.word());
    Bytes received(from + payload.size());
    CHECK(sender->begin(header_of(payload.size())));
    std::size_t sent = 0, got = 0;
    CHECK(eventually([&] {
      sent += sender->write(payload.data() + sent, payload.size() - sent);
      if (receiver->front() != nullptr) got += receiver->read(received.data() + from + got, payload.size() - got);
      return got == payload.size();
    }));
    CHECK(std::equal(payload.begin(), payload.end(), received.begin() + static_cast<std::ptrdiff_t>(from)));
  }
}

void checksums_follow_the_standard_for_any_parts_of_the_data() {
  const char* digits = "123456789";
  const auto* data = reinterpret_cast<const std::byte*>(digits);
  CHECK(crc32c(0, data, 9) == 0xe3069283);  // RFC 3720, B.4, and below
  const Bytes zeros(32);
  CHECK(crc32c(0, zeros.data(), zeros.size()) == 0x8a9136aa);
  Dice dice(12);
  Bytes bytes(100000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.word());
  std::uint32_t by_single_bytes = 0;
  for (const std::byte& byte : bytes) by_single_bytes = crc32c(by_single_bytes, &byte, 1);
  for (int round = 0; round < 50; ++round) {
    std::uint32_t checksum = 0;
    for (std::size_t done = 0; done < bytes.size();) {
      const std::size_t part = std::min(bytes.size() - done, dice.below(40000));
      checksum = crc32c(checksum, bytes.data() + done, part);
      done += part;
    }
    CHECK(checksum == by_single_bytes);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"damaged bytes are refused or end", damaged_bytes_are_refused_or_end},
      {"every flipped bit of a header is detected", every_flipped_bit_of_a_header_is_detected},
      {"any flipped bit of a checked payload is detected", any_flipped_bit_of_a_checked_payload_is_detected},
      {"no byte of a damaged block is delivered", no_byte_of_a_damaged_block_is_delivered},
      {"a block that is damaged twice is refused", a_block_that_is_damaged_twice_is_refused},
      {"channels deliver every byte however often their connections break",
       channels_deliver_every_byte_however_often_their_connections_break},
      {"a stream that lacks lost bytes does not go on", a_stream_that_lacks_lost_bytes_does_not_go_on},
      {"messages of another epoch and out of order are refused",
       messages_of_another_epoch_and_out_of_order_are_refused},
      {"channels over short round trips do without BBR", channels_over_short_round_trips_do_without_bbr},
      {"a channel has at least one stream", a_channel_has_at_least_one_stream},
      {"slow receives go through the stage", slow_receives_go_through_the_stage},
      {"a stage changes its offset in a line after slow receives",
       a_stage_changes_its_offset_in_a_line_after_slow_receives},
      {"a long message arrives whole in direct and staged parts",
       a_long_message_arrives_whole_in_direct_and_staged_parts},
      {"checksums follow the standard for any parts of the data",
       checksums_follow_the_standard_for_any_parts_of_the_data},
  });
}
