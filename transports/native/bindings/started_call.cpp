#include "started_call.h"

namespace nb = nanobind;

namespace unisono {

StartedCall::StartedCall(nb::object endpoint, Kept kept, std::unique_ptr<Request> request)
    : held_endpoint_(std::move(endpoint)),
      kept_(std::move(kept)),
      endpoint_(&nb::cast<Endpoint&>(held_endpoint_)),
      request_(std::move(request)) {}

StartedCall::~StartedCall() {
  if (request_ == nullptr) return;
  const bool done = request_->outcome() == Outcome::done;
  request_.reset();  // which ends the call, if it has not ended
  if (done || !endpoint_->memory_forsaken()) return;
  for (nb::object& each : kept_) each.release();
}

int StartedCall::poll() { return outcome_of(endpoint_->abandoned() ? Outcome::failed : endpoint_->poll(*request_)); }

int StartedCall::wait(double timeout_s) {
  Outcome outcome = endpoint_->abandoned() ? Outcome::failed : request_->outcome();
  if (outcome == Outcome::pending) {
    const nb::gil_scoped_release unlocked;
    outcome = endpoint_->wait(*request_, timeout_s, interrupted);
  }
  return outcome_of(outcome);
}

void StartedCall::go_on(double timeout_s) {
  if (!endpoint_->abandoned()) endpoint_->go_on(*request_, timeout_s);
}

nb::object StartedCall::message() const {
  if (request_->outcome() != Outcome::done || !request_->found()) return nb::none();
  const auto& [source, header] = *request_->found();
  return nb::make_tuple(source, header.group, header.sequence, header.nbytes);
}

nb::object StartedCall::aside() const {
  if (request_->outcome() != Outcome::done || request_->aside().empty()) return nb::none();
  return nb::bytes(request_->aside().data(), request_->aside().size());
}

void bind_started_call(nb::module_& module) {
  nb::class_<StartedCall>(module, "StartedCall")
      .def("poll", &StartedCall::poll)
      .def("wait", &StartedCall::wait, nb::arg("timeout_s"))
      .def("go_on", &StartedCall::go_on, nb::arg("timeout_s"))
      .def("message", &StartedCall::message)
      .def("aside", &StartedCall::aside);
}

}  // namespace unisono
