//! How long the other end of a TCP connection has been silent.
//!
//! The kernel repeats a segment that is not acknowledged after 0.2, 0.6, 1.4 and 3 seconds. So a connection over a
//! network that was gone for two seconds is silent for three. A second connection can be made as soon as the network is
//! back. So the ranks dial it when the first one is silent, and their streams go on over it (tcp/resumption.py).
//!
//! A segment, a heartbeat of the kernel or a probe of a full buffer demands an answer. The kernel reports which of them
//! wait for one, and how long ago it heard from the other end (TCP_INFO). This needs no message of the program, so a
//! rank that computes or is stopped is not silent.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace unisono {

//! Looks at one connection after the other, of one stream.
class Silence {
 public:
  using Clock = std::chrono::steady_clock;

  //! Examines the connection. Silence counts from the first examination that finds an answer missing, so the caller
  //! examines it several times a second.
  void look(int socket, Clock::time_point now);
  //! Forgets the former connection.
  void reset() { unheard_since_ = stuck_since_ = {}; }
  //! How long nothing at all has been heard from the other end, although it must answer.
  Clock::duration unheard(Clock::time_point now) const { return since(unheard_since_, now); }
  //! How long the other end has not acknowledged bytes that it must acknowledge. This rank may still hear from the
  //! other end, if packets are lost in one direction only.
  Clock::duration stuck(Clock::time_point now) const { return since(stuck_since_, now); }

 private:
  using Since = std::optional<Clock::time_point>;
  static Clock::duration since(const Since& since, Clock::time_point now) {
    return since ? now - *since : Clock::duration::zero();
  }

  Since unheard_since_;
  Since stuck_since_;
  std::uint64_t acknowledged_ = 0;  // bytes
};

}  // namespace unisono
