#include "offload/changing.h"

#include <string>
#include <utility>

namespace rpc_ext::offload {

Changing::Changing(std::shared_ptr<Service> service, Service::SessionPtr session, OffloadRequest&& request,
                   Service::ReplyPtr reply, Service::Counted counted)
    : service_(std::move(service)),
      session_(std::move(session)),
      request_(std::move(request)),
      reply_(std::move(reply)),
      counted_(counted),
      left_(request_.entries.size()) {}

void Changing::begin() {
  for (std::size_t i = 0; i < request_.entries.size(); ++i) {
    const KeyEntry& entry = request_.entries[i];
    if (session_->order->arrive(entry.key, entry.after, [self = shared_from_this(), i] { self->enter(i); })) enter(i);
  }
}

// Takes a place in the key's queue.
void Changing::enter(std::size_t i) {
  const KeyEntry& entry = request_.entries[i];
  bool has_turn = false;
  if (session_->order->note_change(entry.key, entry.sequence, entry.expires)) {
    has_turn = session_->space->queues.enter(entry.key, true, [self = shared_from_this(), i] { self->take_turn(i); });
  } else {
    end(i, superseded(entry.key));
  }
  session_->order->pass_on(entry.key, entry.sequence);
  if (has_turn) take_turn(i);
}

// Changes a key, unless the operation is late.
void Changing::take_turn(std::size_t i) {
  if (const auto seconds = session_->order->late(request_.entries[i].expires)) return leave(i, too_late(*seconds));
  if (request_.verb == Verb::put) {
    write(i);
  } else {
    erase(i);
  }
}

void Changing::write(std::size_t i) {
  const KeyEntry& entry = request_.entries[i];
  if (auto problem = session_->space->take(entry.nbytes)) return leave(i, std::move(problem));
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

}  // namespace rpc_ext::offload
