#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

void begin_call(Control& control, std::uint64_t sequence, std::uint64_t digest, const char* text) {
  control.recorder().begin(Ranks::communicator, sequence, digest, description(text), {"train.py", 12});
}

void a_failure_reaches_all_ranks_and_the_first_one_stays() {
  Ranks ranks(4, Transport::shm);
  ranks.control(2).fail({FailureKind::aborted, 2, -1, 5, "enough"});
  for (std::int32_t rank = 0; rank < 4; ++rank)
    CHECK(eventually([&] { return ranks.control(rank).failed(); }) && ranks.control(rank).failure().text == "enough");
  ranks.control(1).fail({FailureKind::internal, 1, -1, 6, "too late"});
  CHECK(ranks.control(1).failure().text == "enough" && ranks.control(1).failure().sequence == 5);
}

void all_ranks_learn_of_a_departure_and_its_farewell() {
  Ranks ranks(3, Transport::shm);
  ranks.control(2).leave("its work was done");
  for (const std::int32_t rank : {0, 1}) {
    CHECK(eventually([&] { return ranks.control(rank).departed(2); }));
    CHECK(ranks.control(rank).farewell(2) == "its work was done" && !ranks.control(rank).failed());
  }
}

void a_departed_rank_may_have_had_channels_that_are_added_later() {
  Ranks ranks(4, Transport::shm);
  Control& waiting = ranks.control(2);
  CHECK(!waiting.opens_no_more(3));
  ranks.control(3).add_channel(2, [] {});
  ranks.control(3).leave("");
  for (const std::int32_t rank : {0, 1, 2}) CHECK(eventually([&] { return ranks.control(rank).departed(3); }));
  CHECK(ranks.control(0).opens_no_more(3) && ranks.control(1).opens_no_more(3) && !waiting.opens_no_more(3));
  waiting.add_channel(3, [] {});
  CHECK(waiting.opens_no_more(3));
}

// The failure that a rank reported may arrive after its channels have ended.
void a_lost_peer_is_reported_by_its_own_failure() {
  Ranks ranks(3, Transport::shm);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.control(1).fail({FailureKind::unavailable, 1, 2, 7, "nothing reaches rank 2"});
  });
  ranks.control(2).lose(1, 7, "rank 1 closed its connection");
  later.join();
  CHECK(ranks.control(2).failure().kind == FailureKind::unavailable);
  CHECK(ranks.control(2).failure().text == "nothing reaches rank 2");
}

void a_lost_peer_is_reported_by_its_farewell_or_else_by_its_channel() {
  for (const bool leaves : {false, true}) {
    Ranks ranks(3, Transport::shm);
    if (leaves) ranks.control(1).leave("its work was done");
    ranks.control(2).lose(1, 7, "rank 1 closed its connection");
    const Failure failure = ranks.control(2).failure();
    CHECK(failure.kind == FailureKind::peer_lost && failure.peer == 1 && failure.sequence == 7);
    CHECK(failure.text == (leaves ? "rank 1 has left: its work was done" : "rank 1 closed its connection"));
  }
}

void a_link_that_ends_without_a_farewell_is_a_lost_peer() {
  Control hub(0, 3);
  SocketPair first = unix_pair();
  SocketPair second = unix_pair();
  hub.add_link(1, std::move(first.a), Descriptor());
  hub.add_link(2, std::move(second.a), Descriptor());
  Control survivor(1, 3);
  survivor.add_link(0, std::move(first.b), Descriptor());
  second.b.reset();
  CHECK(eventually([&] { return survivor.failed(); }));
  CHECK(survivor.failure().kind == FailureKind::peer_lost && survivor.failure().peer == 2);
}

void a_frame_about_a_rank_that_does_not_exist_ends_its_link() {
  for (const std::int32_t wrong : {-2, 3, 1 << 30}) {
    Control hub(0, 3);
    SocketPair pair = unix_pair();
    hub.add_link(1, std::move(pair.a), Descriptor());
    Frame frame;
    frame.type = FrameType::failure;
    frame.failure = FailureKind::peer_lost;
    frame.rank = 1;
    frame.peer = wrong;
    const std::string bytes = encode(frame);
    CHECK(::send(pair.b.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    CHECK(eventually([&] { return hub.failed(); }));
    CHECK(hub.failure().peer == 1);
  }
}

void a_late_rank_learns_of_departures_and_failures() {
  Control hub(0, 3);
  SocketPair early = unix_pair();
  SocketPair late = unix_pair();
  hub.add_link(1, std::move(early.a), Descriptor());
  Control leaver(1, 3);
  leaver.add_link(0, std::move(early.b), Descriptor());
  leaver.leave("gone already");
  CHECK(eventually([&] { return hub.departed(1); }));
  hub.fail({FailureKind::aborted, 0, -1, 0, "over already"});
  hub.add_link(2, std::move(late.a), Descriptor());
  Control newcomer(2, 3);
  newcomer.add_link(0, std::move(late.b), Descriptor());
  CHECK(eventually([&] { return newcomer.departed(1) && newcomer.failed(); }));
  CHECK(newcomer.farewell(1) == "gone already" && newcomer.failure().text == "over already");
}

void ranks_that_disagree_are_named_with_their_calls() {
  Ranks ranks(3, Transport::shm);
  for (std::int32_t rank = 0; rank < 3; ++rank)
    begin_call(ranks.control(rank), 4, rank == 1 ? 8 : 9, rank == 1 ? "barrier()" : "broadcast()");
  ranks.control(0).report_blocked(Ranks::communicator, {}, 4);
  for (std::int32_t rank = 0; rank < 3; ++rank) {
    CHECK(eventually([&] { return ranks.control(rank).failed(); }));
    const Failure failure = ranks.control(rank).failure();
    CHECK(failure.kind == FailureKind::mismatch && failure.peer == 1 && failure.sequence == 4);
    CHECK(failure.text.find("rank 1 called barrier() at train.py:12") != std::string::npos);
    CHECK(failure.text.find("ranks 0 and 2 called broadcast()") != std::string::npos);
  }
}

// A rank that has answered "not called" may make another call and send its message while the judge asks again.
void a_mismatch_waits_for_the_call_of_a_rank_that_had_made_none() {
  Judge judge(3, [](std::int32_t, const Frame&) {});
  const auto now = Judge::Clock::now();
  Frame report;
  report.communicator = Ranks::communicator;
  report.sequence = 5;
  report.type = FrameType::blocked;
  judge.take_report(0, report, now);
  report.type = FrameType::mismatch;
  report.text = "rank 0: rank 2 sent a message of another call";
  judge.take_report(0, report, now);
  const auto answer = [&](std::int32_t rank, CallState state, std::uint64_t digest, const char* text) {
    Frame frame;
    frame.type = FrameType::answer;
    frame.communicator = Ranks::communicator;
    frame.sequence = 5;
    frame.state = state;
    frame.digest = digest;
    frame.text = text;
    judge.take_answer(rank, frame);
  };
  answer(0, CallState::running, 8, "allreduce()");
  answer(1, CallState::running, 8, "allreduce()");
  answer(2, CallState::not_called, 0, "");  // to the first question
  CHECK(!judge.take_failure());
  answer(2, CallState::running, 9, "barrier()");
  const auto failure = judge.take_failure();
  CHECK(failure && failure->text ==
                       "ranks disagree on call #5: rank 2 called barrier(), where ranks 0 and 1 called "
                       "allreduce()");
}

constexpr auto late_time = std::chrono::milliseconds(400);

// Waits until the outlook of a late call has the expected text.
bool eventually_reports(Control& control, std::int64_t sequence, std::int64_t number, const std::string& expected) {
  std::string text;
  return eventually([&] {
    control.report_late(Ranks::communicator, {}, sequence, number, -1, Control::Clock::now() + late_time);
    std::this_thread::sleep_for(late_time / 2);
    text = control.outlook(Ranks::communicator, sequence, number).text;
    return text == expected;
  });
}

// A judge neither asks ranks outside of the communicator nor waits for their answers.
void a_judge_asks_only_ranks_of_the_communicator() {
  Ranks ranks(4, Transport::shm);
  ranks.control(1).recorder().name(Ranks::communicator, " in ranks 1 and 3");
  ranks.control(3).recorder().name(Ranks::communicator, " in ranks 1 and 3");
  begin_call(ranks.control(1), 0, 9, "barrier()");
  ranks.control(3).recorder().begin(8, 5, 7, description("scan()"), {"other.py", 3});
  ranks.control(1).report_late(Ranks::communicator, {1, 3}, 0, -1, -1, Control::Clock::now() + late_time);
  Outlook outlook;
  CHECK(eventually([&] {
    outlook = ranks.control(1).outlook(Ranks::communicator, 0, -1);
    return outlook.peer >= 0;
  }));
  CHECK(outlook.peer == 3 && outlook.text ==
                                 " in call #0 barrier() in ranks 1 and 3 at train.py:12: "
                                 "rank 3 has not called it (it is in scan() at other.py:3)");
}

// Rank 1 uses two communicators in another order than ranks 0 and 2.
void a_rank_that_alone_has_made_a_call_is_named_if_the_others_are_in_another_one() {
  Diagnosis diagnosis;
  diagnosis.sequence = 4;
  diagnosis.ranks.resize(3);
  for (RankReport& report : diagnosis.ranks) {
    report.state = CallState::not_called;
    report.text = "it is in scan() at other.py:3";
  }
  diagnosis.ranks[1].state = CallState::running;
  diagnosis.ranks[1].text = "barrier() at train.py:12";
  const std::string others = "ranks 0 and 2 have not called it (each is in scan() at other.py:3)";
  CHECK(diagnosis.outlook(1, -1).text == " in call #4 barrier() at train.py:12: only rank 1 called it; " + others);
}

void ranks_with_the_same_trouble_are_named_together() {
  Diagnosis diagnosis;
  diagnosis.sequence = 4;
  diagnosis.ranks.resize(8);
  for (const std::size_t rank : {1u, 6u}) {
    diagnosis.ranks[rank].state = CallState::not_called;
    diagnosis.ranks[rank].text = rank == 1 ? "last: scan()" : "it has called nothing";
  }
  diagnosis.ranks[0].state = CallState::running;
  diagnosis.ranks[0].text = "barrier()";
  for (const std::size_t rank : {5u, 7u}) diagnosis.ranks[rank].state = CallState::departed;
  const Outlook outlook = diagnosis.outlook(0, -1);
  CHECK(outlook.peer == 1);
  CHECK(outlook.text ==
        " in call #4 barrier(): rank 1 has not called it (last: scan()); rank 6 has not called it (it has called "
        "nothing); ranks 5 and 7 have left; ranks 2-4 do not answer (are they stopped, or the links to them slow?)");
}

void the_clock_of_rank_0_is_measured() {
  Ranks ranks(3, Transport::shm);
  const auto own = ranks.control(0).measure_clock(std::chrono::seconds(0));
  CHECK(own && own->offset_ns == 0 && own->uncertainty_ns == 0);
  for (const std::int32_t rank : {1, 2}) {
    const auto clock = ranks.control(rank).measure_clock(std::chrono::seconds(100));
    CHECK(clock && clock->uncertainty_ns > 0 && std::abs(clock->offset_ns) <= clock->uncertainty_ns + 1);
  }
  ranks.control(0).leave("");
  CHECK(ranks.control(1).measure_clock(std::chrono::milliseconds(1)));  // the last result
}

// A rank that answers with the times of another clock, or with the time of another question.
void a_clock_that_is_ahead_is_measured_and_other_answers_are_ignored() {
  SocketPair link = unix_pair();
  Control control(1, 2);
  control.add_link(0, std::move(link.a), Descriptor());
  const std::int64_t ahead_ns = std::int64_t{5} << 40;
  std::thread other([&] {
    std::string bytes;
    char buffer[4096];
    for (ssize_t got; (got = ::recv(link.b.get(), buffer, sizeof buffer, 0)) > 0;) {
      bytes.append(buffer, static_cast<std::size_t>(got));
      for (Frame frame; decode(bytes, frame) && frame.type == FrameType::clock;) {
        Frame wrong = frame;
        wrong.type = frame.type = FrameType::time;
        wrong.number -= 1;
        frame.sequence = frame.number + ahead_ns;
        const std::string answers = encode(wrong) + encode(frame);
        if (::send(link.b.get(), answers.data(), answers.size(), MSG_NOSIGNAL) < 0) return;
      }
    }
  });
  const auto clock = control.measure_clock(std::chrono::seconds(100));
  control.leave("");
  other.join();
  CHECK(clock && std::abs(clock->offset_ns - ahead_ns) <= clock->uncertainty_ns + 1);
}

// Rank 0 is stopped. So rank 1 judges, and names rank 0.
void a_silent_hub_is_named_by_its_stand_in() {
  SocketPair to_hub[2] = {unix_pair(), unix_pair()};
  SocketPair link = unix_pair();
  Control stand_in(1, 3);
  Control late(2, 3);
  stand_in.add_link(0, std::move(to_hub[0].a), Descriptor());
  late.add_link(0, std::move(to_hub[1].a), Descriptor());
  stand_in.add_link(2, std::move(link.a), Descriptor());
  late.add_link(1, std::move(link.b), Descriptor());
  begin_call(stand_in, 5, 9, "barrier()");
  begin_call(late, 5, 9, "barrier()");
  CHECK(eventually_reports(
      late, 5, -1,
      " in call #5 barrier() at train.py:12: rank 0 does not answer (is it stopped, or the link to it slow?)"));
}

void ranks_that_wait_for_each_others_messages_are_shown() {
  Ranks ranks(3, Transport::shm);
  const auto receive = [&](std::int32_t rank, std::int32_t source) {
    const auto text = description("recv(source=" + std::to_string(source) + ", tag=0)");
    ranks.control(rank).recorder().begin_message(Ranks::communicator, 0, source, text, {"ring.py", 9});
  };
  const auto outlook = [&](std::int32_t rank, std::int32_t source, std::int64_t number) {
    ranks.control(rank).report_late(Ranks::communicator, {}, -1, number, source, Control::Clock::now() + late_time);
    std::this_thread::sleep_for(late_time / 2);
    return ranks.control(rank).outlook(Ranks::communicator, -1, number);
  };
  receive(0, 2);
  receive(2, 1);
  const std::string waiting = ": rank 2 is in recv(source=1, tag=0) at ring.py:9; rank 1 is in ";
  CHECK(eventually([&] {
    return outlook(0, 2, 1).text ==
           ": rank 2 is in recv(source=1, tag=0) at ring.py:9; rank 1 is in no call (it has "
           "called nothing)";
  }));
  receive(1, 0);
  CHECK(eventually([&] {
    return outlook(0, 2, 2).text == waiting + "recv(source=0, tag=0) at ring.py:9: these ranks wait for each other";
  }));
}

// The recorder stores equal calls in a row as one run, so it keeps all calls of a program that repeats one. Of a
// program that alternates between two calls, it keeps the last 65,536.
void calls_of_ranks_that_run_ahead_are_remembered() {
  FlightRecorder recorder;
  const auto text = description("broadcast()");
  for (std::uint64_t sequence = 0; sequence < 1'000'000; ++sequence)
    recorder.end(recorder.begin(1, sequence, sequence == 7 ? 8 : 9, text, {"train.py", 12}));
  CHECK(recorder.find(1, 7)->digest == 8 && recorder.find(1, 6)->digest == 9 && recorder.find(1, 999'999)->returned);
  for (std::uint64_t sequence = 0; sequence < 70'000; ++sequence) recorder.begin(2, sequence, sequence % 2, text, {});
  CHECK(recorder.find(2, 6'000)->digest == 0 && recorder.find(2, 6'001)->digest == 1);
  CHECK(!recorder.find(2, 3) && !recorder.find(1, 7) && recorder.last(2)->sequence == 69'999);
}

void a_rank_that_has_run_far_ahead_is_not_called_silent() {
  Ranks ranks(2, Transport::shm);
  for (std::uint64_t sequence = 0; sequence < 70'000; ++sequence)
    begin_call(ranks.control(0), sequence, sequence % 2, "broadcast()");
  begin_call(ranks.control(1), 0, 0, "broadcast()");
  CHECK(eventually_reports(ranks.control(1), 0, -1,
                           " in call #0 broadcast() at train.py:12: all ranks have called it, and it did not end"));
}

void a_rank_that_closes_learns_that_others_have_made_its_last_call() {
  for (const bool agree : {true, false}) {
    Ranks ranks(3, Transport::shm);
    for (std::int32_t rank = 0; rank < 2; ++rank) begin_call(ranks.control(rank), 3, 9, "broadcast()");
    std::thread last([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      begin_call(ranks.control(2), 3, agree ? 9 : 8, "broadcast()");
    });
    ranks.control(1).settle(Ranks::communicator, {}, std::chrono::seconds(20), nullptr);
    last.join();
    CHECK(ranks.control(1).failed() != agree);
    CHECK(agree || (ranks.control(1).failure().kind == FailureKind::mismatch && ranks.control(1).failure().peer == 2));
  }
}

// No judge can ask a departed rank. The report that the rank made about its last call still counts.
void the_last_call_of_a_departed_rank_is_compared() {
  Ranks ranks(3, Transport::shm);
  begin_call(ranks.control(1), 3, 8, "broadcast(root=1)");
  ranks.control(1).settle(Ranks::communicator, {}, std::chrono::milliseconds(20), nullptr);
  ranks.control(1).leave("");
  for (const std::int32_t rank : {0, 2}) begin_call(ranks.control(rank), 3, 9, "broadcast(root=0)");
  CHECK(eventually([&] { return ranks.control(2).departed(1); }));
  ranks.control(2).report_blocked(Ranks::communicator, {}, 3);
  CHECK(eventually([&] { return ranks.control(2).failed(); }));
  CHECK(ranks.control(2).failure().kind == FailureKind::mismatch && ranks.control(2).failure().peer == 1);
}

// Rank 0 departs with an error. Rank 1 needs rank 0, and ends soon after. Rank 2 needs rank 1, and must name rank 0.
void the_first_rank_that_departed_with_an_error_is_the_cause() {
  Ranks ranks(3, Transport::shm);
  ranks.control(0).leave("ZeroDivisionError: division by zero");
  CHECK(eventually([&] { return ranks.control(2).departed(0) && ranks.control(1).departed(0); }));
  ranks.control(2).suspect(1, Ranks::communicator, 7, "rank 1 closed its connection");
  CHECK(eventually([&] { return ranks.control(2).failed(); }));
  CHECK(ranks.control(2).failure().text == "rank 0 has left: ZeroDivisionError: division by zero");
  CHECK(ranks.control(2).failure().peer == 0);
}

// Rank 1 leaves while rank 2 links itself to it as a judge. No call needs rank 1.
void the_departure_of_a_suspected_peer_that_no_call_needs_is_no_failure() {
  Ranks ranks(3, Transport::shm);
  ranks.control(2).suspect(1, control_links, -1, "rank 1 refused a link", false);
  ranks.control(1).leave("");
  CHECK(eventually([&] { return ranks.control(2).departed(1); }));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  CHECK(!ranks.control(2).failed());
  ranks.control(2).suspect(0, control_links, -1, "rank 0 refused a link", false);
  CHECK(eventually([&] { return ranks.control(2).failed(); }));
  CHECK(ranks.control(2).failure().text == "rank 0 refused a link");
}

// A call needs the peer, after a link to it has been refused.
void the_departure_of_a_peer_that_a_call_needs_is_the_failure() {
  Ranks ranks(3, Transport::shm);
  ranks.control(2).suspect(1, control_links, -1, "rank 1 refused a link", false);
  ranks.control(2).suspect(1, Ranks::communicator, 7, "rank 1 closed its connection");
  ranks.control(1).leave("");
  CHECK(eventually([&] { return ranks.control(2).failed(); }));
  CHECK(ranks.control(2).failure().text == "rank 1 has left the communicator");
}

void the_next_rank_replaces_a_departed_hub() {
  Ranks ranks(4, Transport::shm);
  ranks.control(0).leave("");
  for (std::int32_t rank = 1; rank < 4; ++rank)
    CHECK(eventually([&] { return ranks.control(rank).judges() == std::vector<std::int32_t>{1, 2}; }));
  for (std::int32_t rank = 1; rank < 4; ++rank) begin_call(ranks.control(rank), 4, rank == 3 ? 8 : 9, "barrier()");
  ranks.control(2).report_blocked(Ranks::communicator, {1, 2, 3}, 4);
  CHECK(eventually([&] { return ranks.control(2).failed() && ranks.control(3).failed(); }));
  CHECK(ranks.control(2).failure().kind == FailureKind::mismatch && ranks.control(3).failure().peer == 3);
}

// A full socket does not take the frame of a failure. The service thread sends the frame when the peer has read.
void a_failure_waits_for_space_in_the_socket() {
  Control control(1, 2);
  SocketPair link = unix_pair();
  const Descriptor same(::dup(link.a.get()));
  control.add_link(0, std::move(link.a), Descriptor());
  std::string bytes(4096, 'x');
  std::size_t before = 0;
  for (ssize_t put; (put = ::send(same.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0;)
    before += static_cast<std::size_t>(put);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // lets the service thread sleep with nothing to write
  control.fail({FailureKind::aborted, 1, -1, 5, "enough"});
  for (ssize_t got; before != 0; before -= static_cast<std::size_t>(got))
    CHECK((got = ::recv(link.b.get(), bytes.data(), std::min(bytes.size(), before), 0)) > 0);
  std::string received;
  for (Frame frame; !decode(received, frame);) {
    const auto got = ::recv(link.b.get(), bytes.data(), bytes.size(), 0);
    CHECK(got > 0);
    received.append(bytes, 0, static_cast<std::size_t>(got));
  }
}

std::string hostile_bytes(Dice& dice) {
  std::string bytes;
  for (std::size_t i = dice.below(4); i > 0; --i) {
    Frame frame;
    frame.type = static_cast<FrameType>(1 + dice.below(10));
    frame.failure = static_cast<FailureKind>(dice.below(6));
    frame.state = static_cast<CallState>(dice.below(6));
    frame.rank = static_cast<std::int32_t>(dice.awkward());
    frame.peer = static_cast<std::int32_t>(dice.awkward());
    frame.communicator = dice.below(2) == 0 ? Ranks::communicator : dice.awkward();
    frame.sequence = static_cast<std::int64_t>(dice.awkward());
    frame.digest = dice.awkward();
    frame.text.assign(dice.below(300), 'x');
    for (std::size_t member = dice.below(4); member > 0; --member)
      frame.members.push_back(static_cast<std::int32_t>(dice.awkward()));
    bytes += encode(frame);
  }
  if (!bytes.empty() && dice.below(3) == 0) bytes[dice.below(bytes.size())] = static_cast<char>(dice.word());
  return bytes;
}

void hostile_frames_do_no_harm() {
  Dice dice(5);
  for (int round = 0; round < 150; ++round) {
    const std::int32_t rank = round % 2;
    Control control(rank, 3);
    SocketPair link = unix_pair();
    begin_call(control, 1, 1, "barrier()");
    control.add_link(rank == 0 ? 2 : 0, std::move(link.a), Descriptor());
    for (int i = 0; i < 20; ++i) {
      const std::string bytes = hostile_bytes(dice);
      if (::send(link.b.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;
    }
    control.report_blocked(Ranks::communicator, {}, 1);
    link.b.reset();
    CHECK(eventually([&] { return control.links() == 0; }));
  }
}

void a_forked_child_abandons_its_links_silently() {
  Ranks ranks(2, Transport::shm);
  const pid_t child = ::fork();
  if (child == 0) {
    ranks.control(0).abandon();
    ranks.control(1).abandon();
    ::_exit(0);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(!ranks.control(0).failed() && !ranks.control(1).failed() && ranks.control(0).links() == 1);
}

}  // namespace

int main() {
  return run_tests({
      {"a failure reaches all ranks and the first one stays", a_failure_reaches_all_ranks_and_the_first_one_stays},
      {"all ranks learn of a departure and its farewell", all_ranks_learn_of_a_departure_and_its_farewell},
      {"a departed rank may have had channels that are added later",
       a_departed_rank_may_have_had_channels_that_are_added_later},
      {"a lost peer is reported by its own failure", a_lost_peer_is_reported_by_its_own_failure},
      {"a lost peer is reported by its farewell or else by its channel",
       a_lost_peer_is_reported_by_its_farewell_or_else_by_its_channel},
      {"a link that ends without a farewell is a lost peer", a_link_that_ends_without_a_farewell_is_a_lost_peer},
      {"a frame about a rank that does not exist ends its link",
       a_frame_about_a_rank_that_does_not_exist_ends_its_link},
      {"a late rank learns of departures and failures", a_late_rank_learns_of_departures_and_failures},
      {"ranks that disagree are named with their calls", ranks_that_disagree_are_named_with_their_calls},
      {"a mismatch waits for the call of a rank that had made none",
       a_mismatch_waits_for_the_call_of_a_rank_that_had_made_none},
      {"a judge asks only ranks of the communicator", a_judge_asks_only_ranks_of_the_communicator},
      {"a rank that alone has made a call is named if the others are in another one",
       a_rank_that_alone_has_made_a_call_is_named_if_the_others_are_in_another_one},
      {"ranks with the same trouble are named together", ranks_with_the_same_trouble_are_named_together},
      {"the clock of rank 0 is measured", the_clock_of_rank_0_is_measured},
      {"a clock that is ahead is measured and other answers are ignored",
       a_clock_that_is_ahead_is_measured_and_other_answers_are_ignored},
      {"a silent hub is named by its stand-in", a_silent_hub_is_named_by_its_stand_in},
      {"ranks that wait for each other's messages are shown", ranks_that_wait_for_each_others_messages_are_shown},
      {"calls of ranks that run ahead are remembered", calls_of_ranks_that_run_ahead_are_remembered},
      {"a rank that has run far ahead is not called silent", a_rank_that_has_run_far_ahead_is_not_called_silent},
      {"a rank that closes learns that others have made its last call",
       a_rank_that_closes_learns_that_others_have_made_its_last_call},
      {"the last call of a departed rank is compared", the_last_call_of_a_departed_rank_is_compared},
      {"the first rank that departed with an error is the cause",
       the_first_rank_that_departed_with_an_error_is_the_cause},
      {"the departure of a suspected peer that no call needs is no failure",
       the_departure_of_a_suspected_peer_that_no_call_needs_is_no_failure},
      {"the departure of a peer that a call needs is the failure",
       the_departure_of_a_peer_that_a_call_needs_is_the_failure},
      {"the next rank replaces a departed hub", the_next_rank_replaces_a_departed_hub},
      {"a failure waits for space in the socket", a_failure_waits_for_space_in_the_socket},
      {"hostile frames do no harm", hostile_frames_do_no_harm},
      {"a forked child abandons its links silently", a_forked_child_abandons_its_links_silently},
  });
}
