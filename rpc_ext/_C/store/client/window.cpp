#include "store/client/window.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "api/error.h"
#include "clock.h"

namespace rpc_ext::store::client {
namespace {

constexpr double kPause = 0.005;  // seconds until a message that RPC had no room for is sent again
constexpr std::uint64_t kBuffered = 8 * (kPack + kLine * kMostEntries);  // bytes of batches that were not answered
constexpr double kShortest = 0.001;  // seconds: timeout of a message whose requests are about to expire

// The windows that send on this thread.
thread_local std::vector<const Window*> sending;

class SendingHere {
 public:
  explicit SendingHere(const Window* window) { sending.push_back(window); }
  ~SendingHere() { sending.pop_back(); }
  SendingHere(const SendingHere&) = delete;
  SendingHere& operator=(const SendingHere&) = delete;
};

// Tells the service that the client gave up a request.
class Abandon final : public StoreMessage {
 public:
  Abandon(WindowPtr window, const RequestPtr& request)
      : StoreMessage(std::move(window), Verb::abandon, entries_of({request}), 0) {}

  void start() override { window->send(*this); }
  void take(Answer&&) override {}
};

std::exception_ptr too_late(const std::string& worker, double seconds, bool was_sent) {
  std::array<char, 32> limit{};
  std::snprintf(limit.data(), limit.size(), "%g", seconds);
  return std::make_exception_ptr(
      api::Failure({.kind = api::Problem::Kind::timeout,
                    .message = "worker '" + worker + "' took more than " + limit.data() + " s; " +
                               (was_sent ? "it has no reply" : "it was not sent: there was no room")}));
}

}  // namespace

Window::Window(OperationsPtr operations, Options options)
    : operations_(std::move(operations)), buffers_(api::make_buffer_pool(kBuffered)), options_(std::move(options)) {}

void Window::submit(const std::vector<RequestPtr>& requests) {
  double deadline = 0;
  bool starts_timer = false;
  {
    const Lock lock(mutex_);
    if (options_.seconds > 0) deadline = now() + options_.seconds;
    for (const RequestPtr& request : requests) {
      request->deadline = deadline;
      issued_.push_back({request, sequence_ + 1});
      enter(request);
    }
    starts_timer = deadline > 0 && !std::exchange(timer_runs_, timer_runs_ || deadline > 0);
  }
  if (starts_timer) {
    try {
      options_.set_timer(shared_from_this(), deadline);
    } catch (...) {  // the system has no more threads
      {
        const Lock lock(mutex_);
        timer_runs_ = false;
      }
      for (const RequestPtr& request : requests) end(request, {.error = std::current_exception()});
      throw;
    }
  }
  go_on();
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

void Window::release_hold(const RequestPtr& request) {
  {
    const Lock lock(mutex_);
    remove_hold(request);
  }
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
  {
    const Lock lock(mutex_);
    outgoing_.insert(outgoing_.end(), messages.begin(), messages.end());
  }
  go_on();
}

// ---- sending

void Window::go_on() {
  if (std::find(sending.begin(), sending.end(), this) != sending.end()) return;
  const SendingHere here(this);
  const PlainTensors plain;
  const auto self = shared_from_this();
  while (true) {
    MessagePtr message;
    {
      const Lock lock(mutex_);
      message = next();
    }
    if (message == nullptr) return;
    try {
      message->start();
    } catch (...) {
      message->fail(std::current_exception());
    }
  }
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
  if (in_flight_ > 0 && in_flight_ + nbytes > options_.size) return nullptr;
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
  const MessagePtr message = first.batch(shared_from_this(), std::move(requests));
  message->is_counted = true;
  return message;
}

void Window::send(StoreMessage& message) {
  StoreRequest request;
  double seconds = 0;
  MessageSenderPtr sender;
  {
    const Lock lock(mutex_);
    request = request_of(message);
    seconds = options_.seconds;
    if (seconds > 0 && message.verb != Verb::abandon) {
      double last = 0;
      for (const SentEntry& each : message.entries) last = std::max(last, each.request->deadline);
      seconds = std::max(last - request.sent, kShortest);
    }
    sender = options_.sender;
  }
  if (request.entries.empty()) return release(message);
  request.data = message.data.defined() ? message.data : no_data();
  Packed packed = pack_request(request);
  const std::string_view body(packed.body.data(), packed.body.size());
  if (!sender->send(body, std::move(packed.tensors), seconds, message.shared_from_this())) pause(message);
}

// Returns the header and the entries of a message, whose requests count as sent from then on.
StoreRequest Window::request_of(StoreMessage& message) {
  if (message.verb != Verb::abandon) drop_done(message);
  drop_oldest();
  StoreRequest request;
  request.verb = message.verb;
  request.token = options_.token;
  request.sent = now();
  request.oldest = issued_.empty() ? sequence_ + 1 : issued_.front().sequence;
  request.service = options_.service;
  for (const SentEntry& each : message.entries) {
    if (each.request->state == KeyRequest::State::waiting) {
      each.request->state = KeyRequest::State::sent;
      for (const RequestPtr& follower : each.request->followers) remove_hold(follower);
    }
    KeyEntry& entry = request.entries.emplace_back(each.request->entry());
    entry.part = each.part;
    entry.at = static_cast<std::uint32_t>(each.at);
    entry.length = static_cast<std::uint32_t>(each.length);
    entry.digest = each.digest;
  }
  return request;
}

// Puts a message back that RPC had no room for.
void Window::pause(StoreMessage& message) {
  {
    const Lock lock(mutex_);
    is_held_ = true;
    in_flight_ -= message.nbytes;
    message.has_room = false;
    outgoing_.push_front(message.shared_from_this());
  }
  try {
    options_.set_timer(shared_from_this(), now() + kPause);  // last: the timer may call at once
  } catch (...) {
    const Lock lock(mutex_);
    is_held_ = false;
    if (std::erase(outgoing_, message.shared_from_this()) != 0) throw;  // otherwise another thread sends it by now
  }
}

// Drops the oldest requests that are done.
void Window::drop_oldest() {
  while (!issued_.empty() && issued_.front().request->state == KeyRequest::State::done) issued_.pop_front();
}

void Window::drop_done(StoreMessage& message) {
  std::erase_if(message.entries, [](const SentEntry& each) { return each.request->state == KeyRequest::State::done; });
}

bool Window::has_pending(StoreMessage& message) {
  {
    const Lock lock(mutex_);
    drop_done(message);
  }
  if (message.entries.empty()) release(message);
  return !message.entries.empty();
}

void Window::release(StoreMessage& message) {
  {
    const Lock lock(mutex_);
    if (std::exchange(message.has_room, false)) in_flight_ -= message.nbytes;
    if (std::exchange(message.is_counted, false)) --ready_.at(static_cast<std::size_t>(message.verb)).batches;
  }
  go_on();
}

// ---- outcomes

bool Window::end(const RequestPtr& request, const RequestEnd& outcome) {
  bool was_sent = false, abandons = false;
  OperationPtr operation;
  {
    const Lock lock(mutex_);
    if (request->state == KeyRequest::State::done) return false;
    was_sent = request->state == KeyRequest::State::sent;
    abandons = was_sent && !outcome.is_answered && !request->followers.empty();
    request->state = KeyRequest::State::done;
    unchain(request, was_sent);
    operation = std::move(request->operation);
  }
  request->drop();
  operation->end(request->index, outcome.error, outcome.nbytes, outcome.digest);
  if (abandons) {
    abandon(request);
  } else if (!was_sent) {
    go_on();
  }
  return true;
}

bool Window::replace(const RequestPtr& request, const RequestPtr& by) {
  {
    const Lock lock(mutex_);
    if (request->state == KeyRequest::State::done || !request->followers.empty()) return false;
    const auto is_its = [&](const Issued& issued) { return issued.request == request; };
    std::find_if(issued_.begin(), issued_.end(), is_its)->request = by;
    by->deadline = request->deadline;
    request->state = KeyRequest::State::done;
    unchain(request, true);
    request->operation = nullptr;  // the other request has it, too
    ++replaced_;
    enter(by);
  }
  request->drop();
  go_on();
  return true;
}

// Takes a request that is done out of the order of its key: those behind it follow the one before it.
void Window::unchain(const RequestPtr& request, bool was_sent) {
  RequestPtr before = request->previous;
  while (before != nullptr && before->state == KeyRequest::State::done) before = before->previous;
  request->previous = before;
  if (const auto last = last_.find(request->key); last != last_.end() && last->second == request) {
    if (before == nullptr) {
      last_.erase(last);
    } else {
      last->second = before;
    }
  }
  const auto followers = std::exchange(request->followers, {});
  if (before != nullptr) before->followers.insert(before->followers.end(), followers.begin(), followers.end());
  if (!was_sent && (before == nullptr || before->state != KeyRequest::State::waiting)) {
    for (const RequestPtr& follower : followers) remove_hold(follower);
  }
}

void Window::abandon(const RequestPtr& request) { enqueue({std::make_shared<Abandon>(shared_from_this(), request)}); }

bool Window::is_done(const KeyRequest& request) const {
  const Lock lock(mutex_);
  return request.state == KeyRequest::State::done;
}

std::optional<double> Window::look(double now) {
  bool was_held = false;
  std::vector<std::pair<RequestPtr, bool>> expired;  // and whether it was sent
  std::optional<double> due;
  double seconds = 0;
  {
    const Lock lock(mutex_);
    was_held = std::exchange(is_held_, false);
    seconds = options_.seconds;
    drop_oldest();
    for (const auto& [request, sequence] : issued_) {
      if (request->state == KeyRequest::State::done) continue;
      if (request->deadline == 0 || request->deadline > now) {
        if (request->deadline > 0) due = request->deadline;
        break;
      }
      expired.emplace_back(request, request->state == KeyRequest::State::sent);
    }
    timer_runs_ = due.has_value();
  }
  for (const auto& [request, was_sent] : expired) {
    end(request, {.error = too_late(operations_->worker(), seconds, was_sent), .is_answered = false});
  }
  if (was_held || !expired.empty()) go_on();
  return due;
}

// ---- options and counts

Window::Statistics Window::statistics() const {
  const Lock lock(mutex_);
  std::uint64_t waiting = 0;
  for (const auto& [request, sequence] : issued_) {
    if (request->holds > 0 && request->state == KeyRequest::State::waiting) waiting += request->weight;
  }
  for (const MessagePtr& message : outgoing_) waiting += message->nbytes;
  for (const Ready& ready : ready_) waiting += ready.nbytes;
  return {in_flight_, waiting, options_.size, replaced_};
}

Window::Options Window::options() const {
  const Lock lock(mutex_);
  return options_;
}

void Window::set_options(Options options) {
  const Lock lock(mutex_);
  std::swap(options_, options);  // the old ones are dropped without the lock
  timer_runs_ = false;           // the next request starts it
}

}  // namespace rpc_ext::store::client
