//! A call that Python has started, with all objects that must stay alive until it ends.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "python_call.h"

namespace unisono {

//! The source, tag, element type and bytes of the message of an ended receive or probe; otherwise None.
nanobind::object message_of(const Request& request);

class StartedCall {
 public:
  //! The objects that own the memory of the call.
  using Kept = std::array<nanobind::object, 3>;

  StartedCall(nanobind::object endpoint, Kept kept, std::unique_ptr<Request> request);
  StartedCall(StartedCall&&) = default;
  StartedCall& operator=(StartedCall&&) = delete;
  //! If the call has failed and a library may still use the memory, its owners are never freed.
  ~StartedCall();

  //! Looks for progress once; returns the outcome.
  int poll();
  //! Waits for the end; returns the outcome.
  int wait(double timeout_s);
  //! Runs the call in the background, with a time limit from now.
  void run_in_background(double timeout_s);
  //! Ends a receive in the background without a message, unless it has matched one.
  void cancel();
  //! The `message_of` its request.
  nanobind::object message() const;
  //! The bytes of an ended receive into device memory, if they are still on the host; otherwise None.
  nanobind::object host_copy() const;
  //! Starts to acknowledge the message that an ended probe has taken, and returns that call; None if the message is not
  //! synchronous.
  nanobind::object acknowledge() const;
  //! Whether the message of an ended receive or probe may be received into an array of this type, length and shape.
  bool fits(std::uint32_t dtype, std::uint64_t nbytes, const std::vector<std::int64_t>& shape) const;

 private:
  nanobind::object held_endpoint_;
  Kept kept_;
  Endpoint* endpoint_;
  std::unique_ptr<Request> request_;
};

void bind_started_call(nanobind::module_& module);

}  // namespace unisono
