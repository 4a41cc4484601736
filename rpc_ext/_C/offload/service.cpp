#include "offload/service.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "clock.h"
#include "offload/changing.h"
#include "offload/parser.h"
#include "offload/reading.h"

namespace rpc_ext::offload {

void Service::close() {
  std::shared_ptr<Slow> slow;
  std::unordered_map<std::string, SessionPtr> sessions;
  const std::lock_guard lock(mutex_);
  slow.swap(slow_);
  sessions.swap(sessions_);
}

// ---- sessions

void Service::add(const std::string& token, SessionPtr session) {
  const std::lock_guard lock(mutex_);
  sessions_.insert_or_assign(token, std::move(session));
}

void Service::remove(const std::string& token) {
  const std::lock_guard lock(mutex_);
  sessions_.erase(token);
}

Service::SessionPtr Service::find(const std::string& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(token);
  return found == sessions_.end() ? nullptr : found->second;
}

// ---- requests

void Service::handle(OffloadRequest&& request, const SessionPtr& session, const ReplyPtr& reply) {
  session->heard = now();
  session->order->note_arrival(request.sent, request.oldest);
  if (request.verb == Verb::abandon || (request.verb == Verb::put && request.entries.front().is_part())) {
    std::shared_ptr<Slow> slow;
    {
      const std::lock_guard lock(mutex_);
      slow = slow_;
    }
    if (slow != nullptr) (*slow)(request, reply);
    return;
  }
  if (request.verb == Verb::get || request.verb == Verb::fetch) {
    std::make_shared<Reading>(shared_from_this(), session, std::move(request), reply)->begin();
    return;
  }
  const auto counted = count_in(*session, request.data.nbytes());
  if (!counted) {
    Errors errors;
    for (std::size_t i = 0; i < request.entries.size(); ++i) errors.emplace_back(i, over_window(*session));
    return send_answer(*reply, request.entries.size(), errors);
  }
  std::make_shared<Changing>(shared_from_this(), session, std::move(request), reply, *counted)->begin();
}

// ---- counts

std::optional<Service::Counted> Service::count_in(Session& session, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (session.in_flight + nbytes > 2 * window_) {
    ++refused_;
    return std::nullopt;
  }
  session.in_flight += nbytes;
  in_flight_ += nbytes;
  most_in_flight_ = std::max(most_in_flight_, in_flight_);
  return Counted{nbytes, now()};
}

void Service::count_out(Session& session, const Counted& counted) {
  const std::lock_guard lock(mutex_);
  session.in_flight -= counted.nbytes;
  in_flight_ -= counted.nbytes;
  latencies_.add(static_cast<std::int64_t>((now() - counted.since) * 1e9));
}

void Service::count(std::uint64_t written, std::uint64_t read, std::uint64_t refused) {
  const std::lock_guard lock(mutex_);
  written_ += written;
  read_ += read;
  refused_ += refused;
}

Problem Service::over_window(const Session& session) const {
  const std::lock_guard lock(mutex_);
  return {.kind = Problem::Kind::blocking,
          .message = std::to_string(session.in_flight) + " bytes are in flight for this client, whose window has " +
                     std::to_string(window_)};
}

Service::Statistics Service::statistics() const {
  const std::lock_guard lock(mutex_);
  return {in_flight_,    most_in_flight_,          written_,
          read_,         latencies_.total(),       refused_,
          late_->load(), latencies_.quantile(0.5), latencies_.quantile(0.99)};
}

// ---- MessageRoute

MessageRoute& MessageRoute::get() {
  static MessageRoute* const route = new MessageRoute;  // leaked: agents' threads may still be in it at exit
  return *route;
}

void MessageRoute::add(const std::string& name, std::shared_ptr<Service> service) {
  const std::lock_guard lock(mutex_);
  services_.insert_or_assign(name, std::move(service));
}

void MessageRoute::remove(const std::string& name) {
  std::shared_ptr<Service> removed;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = services_.find(name); found != services_.end()) {
    removed = std::move(found->second);
    services_.erase(found);
  }
}

bool MessageRoute::handle(std::string_view body, const std::vector<at::Tensor>& tensors,
                          const std::shared_ptr<Reply>& reply) {
  std::shared_ptr<Service> service;
  OffloadRequest request;
  try {
    {
      const std::lock_guard lock(mutex_);
      const auto found = services_.find(service_of(body));
      if (found == services_.end()) return false;
      service = found->second;
    }
    request = parse_request(body, tensors);
  } catch (const std::invalid_argument&) {
    return false;
  }
  const auto session = service->find(request.token);
  if (session == nullptr || !session->is_watched) return false;
  service->handle(std::move(request), session, reply);
  return true;
}

// ---- answers

Problem superseded(const std::string& key) {
  return {.kind = Problem::Kind::timeout,
          .message = "the request to change key '" + key + "' has reached the offload service after a later one"};
}

Problem too_late(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", seconds);
  return {
      .kind = Problem::Kind::timeout,
      .message = std::string("the request has reached the offload service ") + text.data() + " s after its deadline"};
}

Problem bytes_differ(const std::string& key, std::uint64_t length) {
  return {
      .kind = Problem::Kind::checksum,
      .message = "key '" + key + "': the " + std::to_string(length) + " bytes received are not those that were sent"};
}

void send_answer(Reply& reply, std::size_t count, const Errors& errors, Verb verb, const std::vector<Found>& entries,
                 const at::Tensor& data) {
  Packed message = pack_answer(kAnswerHeader, count, errors, verb, entries, data.defined() ? data : no_data());
  reply.send(std::move(message.body), std::move(message.tensors));
}

}  // namespace rpc_ext::offload
