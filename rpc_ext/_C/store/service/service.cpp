#include "store/service/service.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "clock.h"
#include "store/service/reading.h"
#include "store/wire/parser.h"

namespace rpc_ext::store {
namespace {

// ---- Changing

// A request that changes keys, each one in its turn in the per-key queue.
//
// Lock: mutex_ guards the errors and the count of pending entries; nothing is taken under it.
class Changing final : public std::enable_shared_from_this<Changing> {
 public:
  Changing(std::shared_ptr<Service> service, Service::SessionPtr session, StoreRequest&& request,
           Service::ReplyPtr reply, Service::Counted counted);

  void begin();

 private:
  void take_turn(std::size_t i, std::optional<Problem> problem);
  void write(std::size_t i);
  void erase(std::size_t i);
  void leave(std::size_t i, std::optional<Problem> problem);
  void end(std::size_t i, std::optional<Problem> problem);

  const std::shared_ptr<Service> service_;
  const Service::SessionPtr session_;
  StoreRequest request_;
  const Service::ReplyPtr reply_;
  const Service::Counted counted_;
  std::mutex mutex_;
  Errors errors_;
  std::size_t left_;
};

Changing::Changing(std::shared_ptr<Service> service, Service::SessionPtr session, StoreRequest&& request,
                   Service::ReplyPtr reply, Service::Counted counted)
    : service_(std::move(service)),
      session_(std::move(session)),
      request_(std::move(request)),
      reply_(std::move(reply)),
      counted_(counted),
      left_(request_.entries.size()) {}

void Changing::begin() {
  for (std::size_t i = 0; i < request_.entries.size(); ++i) {
    session_->order->enqueue(
        request_.entries[i], session_->space->queues, true,
        [self = shared_from_this(), i](std::optional<Problem> problem) { self->take_turn(i, std::move(problem)); });
  }
}

// Changes a key, unless there is a problem.
void Changing::take_turn(std::size_t i, std::optional<Problem> problem) {
  if (problem) return end(i, std::move(problem));
  if (request_.verb == Verb::put) {
    write(i);
  } else {
    erase(i);
  }
}

void Changing::write(std::size_t i) {
  const KeyEntry& entry = request_.entries[i];
  const auto* const data = static_cast<const std::byte*>(request_.data.const_data_ptr());
  const std::byte* const from = entry.length == 0 ? nullptr : data + entry.at;
  session_->space->write(entry, from, [self = shared_from_this(), i](const Problem* problem) {
    const KeyEntry& entry = self->request_.entries[i];
    std::optional<Problem> told;
    if (problem != nullptr && problem->kind == Problem::Kind::checksum) {
      told = bytes_differ(entry.key, entry.length);
    } else if (problem != nullptr) {
      told = for_client(entry.key, *problem, entry.nbytes);
    }
    const bool is_refused = problem != nullptr && problem->kind == Problem::Kind::checksum;
    self->service_->count(problem == nullptr ? entry.nbytes : 0, 0, is_refused ? 1 : 0);
    self->leave(i, std::move(told));
  });
}

void Changing::erase(std::size_t i) {
  session_->space->erase(request_.entries[i].key, [self = shared_from_this(), i](const Problem* problem) {
    if (problem == nullptr) return self->leave(i, std::nullopt);
    self->leave(i, for_client(self->request_.entries[i].key, *problem));
  });
}

// Ends an entry that had its turn: the next operations on its key have it now.
void Changing::leave(std::size_t i, std::optional<Problem> problem) {
  const std::string key = request_.entries[i].key;
  end(i, std::move(problem));
  session_->space->queues.leave(key);
}

// Ends an entry. With the last one the answer is sent.
void Changing::end(std::size_t i, std::optional<Problem> problem) {
  {
    const std::lock_guard lock(mutex_);
    if (problem) errors_.emplace_back(i, std::move(*problem));
    if (--left_ > 0) return;
  }
  service_->count_out(*session_, counted_);
  request_.data = no_data();  // the memory is free before the client learns of it
  send_answer(*reply_, request_.entries.size(), errors_);
}

}  // namespace

// ---- Service: sessions

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

void Service::handle(StoreRequest&& request, const SessionPtr& session, const ReplyPtr& reply) {
  session->heard = now();
  session->order->note_arrival(request.sent, request.oldest);
  if (request.verb == Verb::abandon) {
    for (const KeyEntry& entry : request.entries) session->abandon(entry);
    return send_answer(*reply, request.entries.size(), {});
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
  if (request.verb == Verb::put && request.entries.front().is_part()) {
    return write_part(std::move(request), session, reply, *counted);
  }
  std::make_shared<Changing>(shared_from_this(), session, std::move(request), reply, *counted)->begin();
}

void Service::write_part(StoreRequest&& request, const SessionPtr& session, const ReplyPtr& reply,
                         const Counted& counted) {
  const KeyEntry& entry = request.entries.front();
  session->put(entry, std::move(request.data),
               [self = shared_from_this(), session, reply, counted, key = entry.key, nbytes = entry.nbytes,
                length = entry.length](const Problem* problem, bool is_refused) {
                 self->count_out(*session, counted);
                 self->count(problem == nullptr ? length : 0, 0, is_refused ? 1 : 0);
                 Errors errors;
                 if (problem != nullptr) errors.emplace_back(0, for_client(key, *problem, nbytes));
                 send_answer(*reply, 1, errors);
               });
}

// ---- counts

std::optional<Service::Counted> Service::count_in(StoreSession& session, std::uint64_t nbytes) {
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

void Service::count_out(StoreSession& session, const Counted& counted) {
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

Problem Service::over_window(const StoreSession& session) const {
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
  StoreRequest request;
  try {
    request = parse_request(body, tensors);
  } catch (const std::invalid_argument&) {
    return false;
  }
  std::shared_ptr<Service> service;
  {
    const std::lock_guard lock(mutex_);
    const auto found = services_.find(request.service);
    if (found == services_.end()) return false;
    service = found->second;
  }
  const auto session = service->find(request.token);
  if (session == nullptr || !session->is_watched) return false;
  service->handle(std::move(request), session, reply);
  return true;
}

// ---- answers

void send_answer(Reply& reply, std::size_t count, const Errors& errors, Verb verb, const std::vector<Found>& entries,
                 const at::Tensor& data) {
  Packed message = pack_answer(kAnswerHeader, count, errors, verb, entries, data.defined() ? data : no_data());
  reply.send(std::move(message.body), std::move(message.tensors));
}

}  // namespace rpc_ext::store
