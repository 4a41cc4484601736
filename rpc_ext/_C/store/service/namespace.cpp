#include "store/service/namespace.h"

#include <algorithm>

namespace rpc_ext::store {
namespace {

constexpr std::size_t kPrefix = 18;  // characters of the prefix of a namespace, such as "k0123456789abcdef/"

}  // namespace

Namespace::Namespace(StorePtr store, std::string prefix, std::optional<std::uint64_t> capacity,
                     const std::vector<std::pair<std::string, std::uint64_t>>& sizes)
    : store_(std::move(store)), prefix_(std::move(prefix)), capacity_(capacity), tensors_(sizes.size()) {
  for (const auto& [key, nbytes] : sizes) {
    sizes_[key] = {nbytes, writes_++};
    used_ += nbytes;
  }
}

bool Namespace::is_empty() const {
  const std::lock_guard lock(mutex_);
  return tensors_ == 0;
}

std::vector<std::string> Namespace::keys() const {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  {
    const std::lock_guard lock(mutex_);
    found.reserve(sizes_.size());
    for (const auto& [key, size] : sizes_) found.emplace_back(size.order, key);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> keys;
  keys.reserve(found.size());
  for (auto& [order, key] : found) keys.push_back(std::move(key));
  return keys;
}

// ---- quota

std::optional<Problem> Namespace::take(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (capacity_ && used_ + nbytes > *capacity_) {
    Problem problem{.kind = Problem::Kind::quota,
                    .message = "no room for " + std::to_string(nbytes) + " bytes in the namespace: " +
                               std::to_string(used_) + " of " + std::to_string(*capacity_) + " are in use"};
    return problem;
  }
  used_ += nbytes;
  ++tensors_;
  return std::nullopt;
}

void Namespace::give_back(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  used_ -= nbytes;
  --tensors_;
}

std::uint64_t Namespace::next_order() {
  const std::lock_guard lock(mutex_);
  return writes_++;
}

void Namespace::settle(const std::string& key, std::uint64_t nbytes, bool has_succeeded, std::uint64_t order) {
  {
    const std::lock_guard lock(mutex_);
    if (has_succeeded && !is_gone_) {
      const auto [found, is_new] = sizes_.try_emplace(key);
      if (!is_new) {
        used_ -= found->second.nbytes;
        --tensors_;
      }
      found->second = {nbytes, order};
      return;
    }
    used_ -= nbytes;
    --tensors_;
  }
  if (has_succeeded) remove({name_of(key)});  // the namespace went meanwhile
}

// ---- the store

void Namespace::write(const KeyEntry& entry, const std::byte* from, Done done) {
  if (const auto problem = take(entry.nbytes)) return done(&*problem);
  auto ended = [self = shared_from_this(), key = entry.key, nbytes = entry.nbytes, order = next_order(),
                done = std::move(done)](const Problem* problem) {
    self->settle(key, nbytes, problem == nullptr, order);
    done(problem);
  };
  store_->write({name_of(entry.key), entry.dtype, &entry.sizes, from, entry.length, entry.digest}, std::move(ended));
}

void Namespace::erase(const std::string& key, Done done) {
  store_->erase({name_of(key)}, [self = shared_from_this(), key, done = std::move(done)](const Problem* problem) {
    if (problem != nullptr) return done(problem);
    {
      const std::lock_guard lock(self->mutex_);
      if (const auto found = self->sizes_.find(key); found != self->sizes_.end()) {
        self->used_ -= found->second.nbytes;
        --self->tensors_;
        self->sizes_.erase(found);
      }
    }
    done(nullptr);
  });
}

void Namespace::clear() {
  std::vector<std::string> names;
  {
    const std::lock_guard lock(mutex_);
    is_gone_ = true;
    names.swap(left_over_);
    for (const auto& [key, size] : sizes_) {
      names.push_back(name_of(key));
      used_ -= size.nbytes;
    }
    tensors_ -= sizes_.size();
    sizes_.clear();
  }
  remove(std::move(names));
}

// Deletes names that no reader looks for. What the disk fails to delete is deleted by the next clear().
void Namespace::remove(std::vector<std::string> names) {
  if (names.empty()) return;
  store_->erase(names, [self = shared_from_this(), names](const Problem* problem) {
    if (problem == nullptr || problem->kind == Problem::Kind::invalid_state) return;  // the store was closed
    std::vector<std::string> left;
    for (const std::string& name : names) {
      if (self->store_->find(name)) left.push_back(name);
    }
    const std::lock_guard lock(self->mutex_);
    self->left_over_.insert(self->left_over_.end(), left.begin(), left.end());
  });
}

// ---- problems

Problem bytes_differ(const std::string& key, std::uint64_t length) {
  return {
      .kind = Problem::Kind::checksum,
      .message = "key '" + key + "': the " + std::to_string(length) + " bytes received are not those that were sent"};
}

Problem no_such_key(const std::string& key) {
  return {.kind = Problem::Kind::not_found, .message = "there is no key '" + key + "'"};
}

Problem for_client(const std::string& key, const Problem& problem, std::optional<std::uint64_t> nbytes) {
  if (problem.kind == Problem::Kind::not_found) return no_such_key(key);
  Problem told = problem;
  std::string& message = told.message;
  if (problem.kind == Problem::Kind::quota && nbytes) {
    // The store counts whole pages, and the pieces of a file: "no room for <n> bytes[ in one piece]".
    const std::string begin = "no room for ", end = " bytes", piece = " in one piece";
    std::size_t at = message.starts_with(begin) ? message.find(end, begin.size()) : std::string::npos;
    if (at != std::string::npos) {
      at += end.size();
      if (message.compare(at, piece.size(), piece) == 0) at += piece.size();
      message = begin + std::to_string(*nbytes) + end + message.substr(at);
    }
    told.wanted = *nbytes;
  }
  const std::string unnamed = "key '";  // a read of a snapshot names no key
  if (message.starts_with(unnamed + "': its ")) message.insert(unnamed.size(), key);
  // The store knows the key by the prefix of its namespace.
  for (std::size_t at = message.find(key); at != std::string::npos; at = message.find(key, at + 1)) {
    if (at < kPrefix || message[at - kPrefix] != 'k') continue;
    if (message[at - 1] != '/' && message[at - 1] != '~') continue;
    message.erase(at -= kPrefix, kPrefix);
  }
  return told;
}

}  // namespace rpc_ext::store
