// Control links: a rank that judges the job, and two hostile ranks that send it any frames, or other bytes.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>

#include "control/control.h"
#include "fuzz.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t communicator = 3;
constexpr int most_wait_ms = 10'000;

std::string text_of(Input& input, std::size_t most) {
  const auto part = input.bytes(most);
  return {part.begin(), part.end()};
}

Frame frame_of(Input& input) {
  Frame frame;
  frame.type = static_cast<FrameType>(input.take<std::uint8_t>() % 14);
  frame.failure = static_cast<FailureKind>(input.take<std::uint8_t>() % 9);
  frame.state = static_cast<CallState>(input.take<std::uint8_t>() % 8);
  frame.rank = input.take<std::int8_t>() % 4;
  frame.peer = input.take<std::int8_t>() % 4;
  frame.waits_for = input.take<std::int8_t>() % 4;
  frame.communicator = input.take<std::uint8_t>() % 8;
  frame.sequence = input.take<std::int8_t>();
  frame.number = input.take<std::int8_t>();
  frame.digest = input.take<std::uint8_t>();
  frame.time_left_us = input.take<std::uint64_t>();
  frame.text = text_of(input, input.take<std::uint8_t>());
  for (std::size_t i = input.take<std::uint8_t>() % 5; i > 0; --i) frame.members.push_back(input.take<std::int8_t>());
  return frame;
}

void send_bytes(int socket, const std::string& bytes) {
  ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Ends the link and waits until the judge has read everything, and has closed its side.
void end(int socket) {
  std::array<char, 4096> answers;
  ::shutdown(socket, SHUT_WR);
  pollfd descriptor{socket, POLLIN, 0};
  do {
    int ready;
    while ((ready = ::poll(&descriptor, 1, most_wait_ms)) < 0 && errno == EINTR) {  // a timer of libFuzzer
    }
    CHECK(ready == 1);
  } while (::recv(socket, answers.data(), answers.size(), MSG_DONTWAIT) > 0);
}

// Python must be able to read each text.
void check_text(const std::string& text) {
  Frame frame;
  frame.text = text;
  frame.failure = FailureKind::aborted;
  std::string bytes = encode(frame);
  Frame again;
  CHECK(decode(bytes, again) && frame.text.starts_with(again.text));
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  Control judge(0, 3);
  std::array<SocketPair, 2> links{unix_pair(), unix_pair()};
  for (std::int32_t peer = 1; peer < 3; ++peer)
    judge.add_link(peer, std::move(links[static_cast<std::size_t>(peer - 1)].a), Descriptor());
  judge.recorder().name(communicator, "ranks 0-2");
  if (input.take<std::uint8_t>() % 2 != 0) {
    judge.report_blocked(communicator, {}, 1);
    judge.report_late(communicator, {0, 1}, 2, 2, 1, Control::Clock::now() + 1s);
  }
  while (!input.empty()) {
    const std::uint8_t move = input.take<std::uint8_t>();
    const int socket = links[move % 2].b.get();
    if (move / 2 % 4 == 0)
      send_bytes(socket, text_of(input, input.take<std::uint8_t>()));
    else
      send_bytes(socket, encode(frame_of(input)));
  }
  for (const SocketPair& link : links) end(link.b.get());
  CHECK(judge.links() == 0);  // this takes the mutex, so all has been noted
  CHECK(judge.failed() || (judge.departed(1) && judge.departed(2)));
  if (judge.failed()) CHECK(judge.failure().kind != FailureKind::none && judge.failure().peer < 3);
  check_text(judge.failure().text);
  for (std::int32_t rank = 0; rank < 3; ++rank) check_text(judge.farewell(rank));
  for (const std::int64_t sequence : {1, 2}) check_text(judge.outlook(communicator, sequence, sequence).text);
  return 0;
}
