#include "store/service/reading.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "api/checksum.h"

namespace rpc_ext::store {

Reading::Reading(std::shared_ptr<Service> service, Service::SessionPtr session, StoreRequest&& request,
                 Service::ReplyPtr reply)
    : service_(std::move(service)),
      session_(std::move(session)),
      request_(std::move(request)),
      reply_(std::move(reply)),
      left_(request_.entries.size()),
      found_(request_.entries.size()) {}

void Reading::begin() {
  if (request_.verb == Verb::fetch) return place_kept();
  for (std::size_t i = 0; i < request_.entries.size(); ++i) {
    session_->order->enqueue(
        request_.entries[i], session_->space->queues, false,
        [self = shared_from_this(), i](std::optional<Problem> problem) { self->look_up(i, std::move(problem)); });
  }
}

// Takes the snapshot of a key that has its turn. With the last one the bytes are read.
void Reading::look_up(std::size_t i, std::optional<Problem> problem) {
  const std::string& key = request_.entries[i].key;
  if (service_->store().is_closed()) {
    problem = Problem{.kind = Problem::Kind::invalid_state, .message = "the store is closed"};
  } else if (!problem) {
    found_[i] = session_->space->find(key);
    if (!found_[i]) problem = no_such_key(key);
  }
  {
    const std::lock_guard lock(mutex_);
    if (problem) errors_.emplace_back(i, std::move(*problem));
    if (--left_ > 0) return;
  }
  place_found();
}

// Places as many tensors as fit into the answer; keeps the others for the client to fetch.
void Reading::place_found() {
  double expires = 0;
  bool has_deadline = true;
  for (std::size_t i = 0; i < found_.size(); ++i) {
    const KeyEntry& entry = request_.entries[i];
    expires = std::max(expires, entry.expires);
    has_deadline = has_deadline && entry.expires != 0;
    if (!found_[i]) continue;
    const FoundTensor& tensor = *found_[i];
    const std::uint64_t at = next_line(nbytes_), length = part_length(tensor.nbytes, 0);
    const bool fits = at + length <= kPart;
    if (!fits || length < tensor.nbytes) session_->keep(entry, tensor, fits);
    places_.push_back(
        {i, entry.key, tensor, 0, fits ? at : 0, fits ? length : 0, entry.needs_digest || !tensor.has_digest});
    if (fits) nbytes_ = at + length;
  }
  found_.clear();
  take_buffer(has_deadline ? expires : 0);
}

// Places the parts of kept tensors.
void Reading::place_kept() {
  for (std::size_t i = 0; i < request_.entries.size(); ++i) {
    const KeyEntry& entry = request_.entries[i];
    auto kept = session_->take(entry.sequence, entry.part);
    if (!kept) {
      errors_.emplace_back(i, Problem{.kind = Problem::Kind::invalid_state,
                                      .message = "the store service does not keep this read: its session or its time "
                                                 "is over"});
      continue;
    }
    const std::uint64_t begin = std::uint64_t{entry.part} * kPart, at = next_line(nbytes_);
    const std::uint64_t length = part_length(kept->tensor.nbytes, entry.part);
    if (at + length > kPart) {
      errors_.emplace_back(
          i, Problem{.kind = Problem::Kind::value,
                     .message = std::to_string(request_.entries.size()) + " parts have more bytes than an answer"});
      continue;
    }
    const bool needs_digest = kept->needs_digest || !kept->tensor.has_digest;
    places_.push_back({i, std::move(kept->key), std::move(kept->tensor), begin, at, length, needs_digest});
    nbytes_ = at + length;
  }
  take_buffer(0);
}

// Takes room in the client's window, and a buffer, within a deadline of the client; 0: none.
void Reading::take_buffer(double expires) {
  counted_ = service_->count_in(*session_, nbytes_);
  if (!counted_) return answer_with(service_->over_window(*session_));
  session_->take_buffer(nbytes_, expires, [self = shared_from_this()](at::Tensor data) {
    if (!data.defined()) {
      return self->answer_with({.kind = Problem::Kind::timeout,
                                .message = "no buffer for the answer was free in time, or the session has ended"});
    }
    self->data_ = std::move(data);
    self->read();
  });
}

void Reading::read() {
  std::vector<api::PartRead> parts;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (place.length == 0) {
      place.needs_digest = true;
      place.digest = api::digest_of(nullptr, 0);
      continue;
    }
    filled_.push_back(i);
    parts.push_back(part_of(place));
  }
  if (parts.empty()) return answer();
  service_->store().read(parts, [self = shared_from_this()](const Problem* problem) {
    if (problem != nullptr && self->filled_.size() > 1) {  // each is read alone, to learn the error of each
      self->left_ = self->filled_.size();
      for (std::size_t at = 0; at < self->filled_.size(); ++at) self->read_one(at);
      return;
    }
    if (problem != nullptr) self->places_[self->filled_.front()].problem = *problem;
    self->answer();
  });
}

api::PartRead Reading::part_of(Place& place) const {
  auto* const into = static_cast<std::byte*>(data_.mutable_data_ptr()) + place.at;
  return {&place.tensor, place.begin, into, place.length, place.needs_digest ? &place.digest : nullptr};
}

void Reading::read_one(std::size_t at) {
  Place& place = places_[filled_[at]];
  service_->store().read({part_of(place)}, [self = shared_from_this(), &place](const Problem* problem) {
    if (problem != nullptr) place.problem = *problem;
    self->one_was_read();
  });
}

void Reading::one_was_read() {
  {
    const std::lock_guard lock(mutex_);
    if (--left_ > 0) return;
  }
  answer();
}

// ---- the answer

void Reading::answer() {
  bool has_failed = false;
  for (const Place& place : places_) {
    if (!place.problem) continue;
    has_failed = true;
    errors_.emplace_back(place.entry, for_client(place.key, *place.problem, place.length));
  }
  if (has_failed) move_together();
  clear_gaps();
  std::vector<Found> entries;
  std::uint64_t sent = 0;
  for (Place& place : places_) {
    const FoundTensor& tensor = place.tensor;
    entries.push_back({tensor.dtype, tensor.sizes, tensor.nbytes, static_cast<std::uint32_t>(place.at),
                       static_cast<std::uint32_t>(place.length),
                       place.needs_digest ? std::optional(place.digest) : std::nullopt, tensor.has_digest,
                       tensor.digest, tensor.seed});
    sent += place.length;
  }
  places_.clear();  // the snapshots keep room on the disk
  service_->count(0, sent, 0);
  service_->count_out(*session_, *counted_);
  send_answer(*reply_, request_.entries.size(), errors_, request_.verb, entries, data_);
}

// Answers with the same error for all places.
void Reading::answer_with(const Problem& problem) {
  for (const Place& place : places_) errors_.emplace_back(place.entry, problem);
  places_.clear();
  if (counted_) service_->count_out(*session_, *counted_);
  send_answer(*reply_, request_.entries.size(), errors_, request_.verb);
}

// Moves the bytes of places together, after others could not be read: nothing is sent in place of those.
void Reading::move_together() {
  std::erase_if(places_, [](const Place& place) { return place.problem.has_value(); });
  auto* const data = static_cast<std::byte*>(data_.mutable_data_ptr());
  std::uint64_t end = 0;
  for (Place& place : places_) {
    const std::uint64_t at = place.length == 0 ? end : next_line(end);
    std::memmove(data + at, data + place.at, place.length);
    place.at = at;
    end = at + place.length;
  }
  data_ = alone(data_, 0, static_cast<std::int64_t>(end));
}

// Overwrites the bytes between those of the places: they are sent, too, and may be another client's.
void Reading::clear_gaps() {
  auto* const data = static_cast<std::byte*>(data_.mutable_data_ptr());
  std::uint64_t end = 0;
  for (const Place& place : places_) {
    if (place.length == 0) continue;
    std::memset(data + end, 0, place.at - end);
    end = place.at + place.length;
  }
  if (const std::uint64_t size = data_.nbytes(); size > end) std::memset(data + end, 0, size - end);
}

}  // namespace rpc_ext::store
