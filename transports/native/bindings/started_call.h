// A call that has been started from Python, with everything that must stay alive as long as it goes on.
#pragma once

#include <array>
#include <memory>

#include "python_call.h"

namespace unisono {

class StartedCall {
 public:
  // What holds the memory of the call.
  using Kept = std::array<nanobind::object, 3>;

  StartedCall(nanobind::object endpoint, Kept kept, std::unique_ptr<Request> request);
  StartedCall(StartedCall&&) = default;
  StartedCall& operator=(StartedCall&&) = delete;
  // What holds the memory stays for ever if the call has failed and a library may still use it.
  ~StartedCall();

  int poll();
  int wait(double timeout_s);
  void go_on(double timeout_s);
  // Of a receive or a probe that has ended: source, tag, element type and bytes of the message, or None.
  nanobind::object message() const;
  // Of a receive to other memory than the host's that has ended: the bytes, if they had to be left on the host, or
  // None.
  nanobind::object aside() const;

 private:
  nanobind::object held_endpoint_;
  Kept kept_;
  Endpoint* endpoint_;
  std::unique_ptr<Request> request_;
};

void bind_started_call(nanobind::module_& module);

}  // namespace unisono
