#include "store/client/window.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "clock.h"

namespace rpc_ext::store::client {
namespace {

constexpr double kPause = 0.005;     // seconds until a message that RPC had no room for is sent again
constexpr double kShortest = 0.001;  // seconds: timeout of a message whose requests are about to expire

py::object python(const char* module, const char* name) { return py::module_::import(module).attr(name); }

// The windows that send on this thread.
thread_local std::vector<const Window*> sending;

class SendingHere {
 public:
  explicit SendingHere(const Window* window) { sending.push_back(window); }
  ~SendingHere() { sending.pop_back(); }
  SendingHere(const SendingHere&) = delete;
  SendingHere& operator=(const SendingHere&) = delete;
};

bool is_interrupt(const py::object& error) { return PyObject_IsInstance(error.ptr(), PyExc_Exception) == 0; }

// Tells the service that the client gave up a request.
class Abandon final : public StoreMessage {
 public:
  Abandon(WindowPtr window, const RequestPtr& request) : StoreMessage(std::move(window), Verb::abandon, {request}, 0) {}

  // The request itself is done.
  void start() override { window->send(*this, {requests.front()->entry()}, no_data()); }
  void take(Answer&&) override {}
};

}  // namespace

Window::Window(py::object channel, std::string service, std::string token, std::string worker, std::uint64_t size,
               double seconds, py::object buffers)
    : token(std::move(token)),
      size(size),
      buffers(std::move(buffers)),
      store_thread(python("rpc_ext.store._buffers", "store_thread")),
      future_class(python("cudafuture", "CUDAFuture")),
      digest(python("cudafuture.io", "digest")),
      digest_class(python("cudafuture.io", "Digest")),
      expected_digest_class(python("rpc_ext.store._source", "ExpectedDigest")),
      expect_digest(python("rpc_ext.store._source", "expect_digest")),
      checksum_error(python("cudafuture.errors", "ChecksumError")),
      error_from(python("rpc_ext.store._errors", "error_from")),
      digests_(python("cudafuture.io", "digests")),
      schedule_(python("rpc_ext._timer", "schedule")),
      service_(std::move(service)),
      worker_(std::move(worker)),
      seconds_(seconds) {
  set_channel(std::move(channel));
}

void Window::set_channel(py::object channel) {
  native_channel_ = py::isinstance<Channel>(channel) ? channel.cast<Channel*>() : nullptr;
  channel_ = std::move(channel);
}

void Window::set_seconds(double seconds) {
  seconds_ = seconds;
  timer_runs_ = false;  // the next request starts it
}

std::vector<std::uint64_t> Window::digests_of(const at::Tensor& data,
                                              const std::vector<std::pair<std::uint64_t, std::uint64_t>>& places,
                                              const std::optional<std::vector<std::uint64_t>>& seeds) const {
  return call(digests_, data, places, seeds).cast<std::vector<std::uint64_t>>();
}

void Window::submit(const std::vector<RequestPtr>& requests) {
  const double now = rpc_ext::now();
  const double deadline = seconds_ > 0 ? now + seconds_ : 0;
  for (const RequestPtr& request : requests) {
    request->deadline = deadline;
    issued_.push_back({request, sequence_ + 1});
    enter(request);
  }
  if (deadline > 0 && !timer_runs_) {
    timer_runs_ = true;
    try {
      set_timer(deadline);
    } catch (...) {  // the system has no more threads
      timer_runs_ = false;
      const py::object error = error_of(std::current_exception());
      for (const RequestPtr& request : requests) end(request, py::none(), error);
      throw;
    }
  }
  if (const py::object interrupt = go_on(); !interrupt.is_none()) {
    PyErr_SetObject(py::type::handle_of(interrupt).ptr(), interrupt.ptr());
    throw py::error_already_set();
  }
}

// Puts a request behind the others of its key. It is ready unless it has to wait.
void Window::enter(const RequestPtr& request) {
  request->sequence = ++sequence_;
  RequestPtr& last = last_[request->key];
  if (last != nullptr) {
    request->previous = last;
    last->followers.push_back(request);
    request->holds += last->state == KeyRequest::State::waiting ? 1 : 0;
  }
  last = request;
  if (request->holds == 0) make_ready(request);
}

// Takes the oldest request out of the queue, and drops it only then: that may run Python, which may call the window.
void Window::take_oldest() {
  const RequestPtr oldest = std::move(issued_.front().request);
  issued_.pop_front();
}

void Window::set_timer(double due) { call(schedule_, shared_from_this(), due); }

void Window::release_hold(const RequestPtr& request) {
  remove_hold(request);
  go_on();
}

void Window::remove_hold(const RequestPtr& request) {
  if (--request->holds == 0 && request->state == KeyRequest::State::waiting) make_ready(request);
}

void Window::make_ready(const RequestPtr& request) {
  const auto messages = request->messages(shared_from_this());
  if (!messages.empty()) {
    outgoing_.insert(outgoing_.end(), messages.begin(), messages.end());
    return;
  }
  Ready& ready = ready_.at(static_cast<std::size_t>(request->verb));
  ready.requests.push_back(request);
  ready.nbytes += request->weight;
}

void Window::enqueue(const std::vector<MessagePtr>& messages) {
  outgoing_.insert(outgoing_.end(), messages.begin(), messages.end());
  go_on();
}

// ---- sending

py::object Window::go_on() {
  py::object interrupt = py::none();
  if (std::find(sending.begin(), sending.end(), this) != sending.end()) return interrupt;
  const SendingHere here(this);
  const auto self = shared_from_this();
  while (const MessagePtr message = next()) {
    try {
      message->start();
    } catch (...) {
      const py::object error = error_of(std::current_exception());
      message->failed(error);
      if (interrupt.is_none() && is_interrupt(error)) interrupt = error;
    }
  }
  return interrupt;
}

// Takes the next message, and room for it.
MessagePtr Window::next() {
  for (std::size_t verb = 0; verb < ready_.size(); ++verb) {
    while (!ready_[verb].requests.empty() && (ready_[verb].batches == 0 || is_full(verb))) {
      outgoing_.push_back(form_batch(verb));
    }
  }
  if (outgoing_.empty() || is_held_) return nullptr;
  const std::uint64_t nbytes = outgoing_.front()->nbytes;
  if (in_flight_ > 0 && in_flight_ + nbytes > size) return nullptr;
  in_flight_ += nbytes;
  MessagePtr message = std::move(outgoing_.front());
  outgoing_.pop_front();
  message->has_room = true;
  return message;
}

bool Window::is_full(std::size_t verb) const {
  return ready_[verb].requests.size() >= kMostEntries || ready_[verb].nbytes >= kPack;
}

MessagePtr Window::form_batch(std::size_t verb) {
  Ready& ready = ready_[verb];
  std::vector<RequestPtr> requests;
  std::unordered_set<std::string_view> keys;
  std::uint64_t nbytes = 0;
  while (!ready.requests.empty() && requests.size() < kMostEntries) {
    const RequestPtr& request = ready.requests.front();
    if (!requests.empty() && nbytes + request->weight > kPack) break;
    if (!keys.insert(request->key).second) break;
    nbytes += request->weight;
    requests.push_back(std::move(ready.requests.front()));
    ready.requests.pop_front();
  }
  ready.nbytes -= nbytes;
  ++ready.batches;
  KeyRequest& first = *requests.front();
  return first.batch(shared_from_this(), std::move(requests));
}

void Window::send(StoreMessage& message, std::vector<KeyEntry> entries, const at::Tensor& data) {
  const double now = rpc_ext::now();
  double timeout = seconds_;
  if (seconds_ > 0 && !message.requests.empty()) {
    double last = 0;
    for (const RequestPtr& request : message.requests) last = std::max(last, request->deadline);
    timeout = std::max(last - now, kShortest);
  }
  while (!issued_.empty() && issued_.front().request->is_done()) take_oldest();
  StoreRequest request;
  request.verb = message.verb;
  request.token = token;
  request.sent = now;
  request.oldest = issued_.empty() ? sequence_ + 1 : issued_.front().sequence;
  request.service = service_;
  request.entries = std::move(entries);
  request.data = data;
  auto packed = pack_request(request);
  const std::string_view body(packed.body.data(), packed.body.size());
  if (pass_on(body, std::move(packed.tensors), timeout, message.shared_from_this())) return;
  is_held_ = true;
  in_flight_ -= message.nbytes;
  message.has_room = false;
  outgoing_.push_front(message.shared_from_this());
  try {
    set_timer(rpc_ext::now() + kPause);  // last: the timer thread may call at once
  } catch (...) {
    is_held_ = false;
    throw;
  }
}

// Sends a message through the channel; false: RPC has no room for it.
bool Window::pass_on(std::string_view body, std::vector<at::Tensor> tensors, double seconds,
                     const MessagePtr& message) {
  if (native_channel_ != nullptr) return native_channel_->send(body, std::move(tensors), seconds, message);
  try {
    call(channel_.attr("send"), py::bytes(body.data(), body.size()), std::move(tensors), seconds, message);
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_BlockingIOError)) throw;
    return false;
  }
  return true;
}

void Window::mark_sent(const std::vector<RequestPtr>& requests) {
  for (const RequestPtr& request : requests) {
    if (request->state != KeyRequest::State::waiting) continue;
    request->state = KeyRequest::State::sent;
    for (const RequestPtr& follower : std::vector(request->followers)) remove_hold(follower);
  }
}

void Window::release(StoreMessage& message) {
  if (message.has_room) {
    message.has_room = false;
    in_flight_ -= message.nbytes;
    if (message.is_batch) --ready_.at(static_cast<std::size_t>(message.verb)).batches;
  }
  go_on();
}

// ---- outcomes

bool Window::end(const RequestPtr& request, const py::object& value, const py::object& error, bool answered) {
  if (request->is_done()) return false;
  const bool was_sent = request->state == KeyRequest::State::sent;
  const bool abandons = was_sent && !answered && !request->followers.empty();
  request->state = KeyRequest::State::done;
  unchain(request, was_sent);
  const OperationPtr operation = std::move(request->operation);
  request->drop();
  if (error.is_none() && request->gives_future()) {
    operation->join(request->index, value);
  } else {
    operation->end(request->index, value, error);
  }
  if (abandons) {
    abandon(request);
  } else if (!was_sent) {
    go_on();
  }
  return true;
}

void Window::replace(const RequestPtr& request, const RequestPtr& by) {
  if (request->is_done()) return;
  const auto is_its = [&](const Issued& issued) { return issued.request == request; };
  std::find_if(issued_.begin(), issued_.end(), is_its)->request = by;
  by->deadline = request->deadline;
  request->state = KeyRequest::State::done;
  unchain(request, true);
  request->operation = nullptr;
  request->drop();
  ++replaced_;
  try {
    enter(by);
  } catch (...) {
    end(by, py::none(), error_of(std::current_exception()));
  }
  go_on();
}

// Takes a request that is done out of the order of its key: those behind it follow the one before it.
void Window::unchain(const RequestPtr& request, bool was_sent) {
  RequestPtr before = request->previous;
  while (before != nullptr && before->is_done()) before = before->previous;
  const RequestPtr replaced = std::exchange(request->previous, before);  // dropped at the end: see take_oldest
  if (const auto last = last_.find(request->key); last != last_.end() && last->second == request) {
    if (before == nullptr) {
      last_.erase(last);
    } else {
      last->second = before;
    }
  }
  const auto followers = std::move(request->followers);
  request->followers.clear();
  if (before != nullptr) before->followers.insert(before->followers.end(), followers.begin(), followers.end());
  if (!was_sent && (before == nullptr || before->state != KeyRequest::State::waiting)) {
    for (const RequestPtr& follower : followers) remove_hold(follower);
  }
}

void Window::abandon(const RequestPtr& request) { enqueue({std::make_shared<Abandon>(shared_from_this(), request)}); }

std::optional<double> Window::look(double now) {
  const bool was_held = std::exchange(is_held_, false);
  while (!issued_.empty()) {
    const RequestPtr oldest = issued_.front().request;
    if (oldest->is_done()) {
      take_oldest();
      continue;
    }
    if (oldest->deadline == 0 || oldest->deadline > now) break;
    const bool waits = oldest->state == KeyRequest::State::waiting;
    std::array<char, 32> limit{};
    std::snprintf(limit.data(), limit.size(), "%g", seconds_);
    const std::string message = "worker '" + worker_ + "' took more than " + limit.data() + " s; " +
                                (waits ? "it was not sent: there was no room" : "it has no reply");
    end(oldest, py::none(), py::reinterpret_borrow<py::object>(PyExc_TimeoutError)(message), false);
  }
  if (was_held) go_on();
  std::optional<double> due;
  if (!issued_.empty() && issued_.front().request->deadline > 0) due = issued_.front().request->deadline;
  timer_runs_ = due.has_value();
  return due;
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> Window::statistics() const {
  std::uint64_t waiting = 0;
  for (const auto& [request, sequence] : issued_) {
    if (request->holds > 0 && request->state == KeyRequest::State::waiting) waiting += request->weight;
  }
  for (const MessagePtr& message : outgoing_) waiting += message->nbytes;
  for (const Ready& ready : ready_) waiting += ready.nbytes;
  return {in_flight_, waiting, size, replaced_};
}

}  // namespace rpc_ext::store::client
