// The operations of engines that have not ended, in one registry: what holds up everything else.
//
//     an engine makes a future ──► set_operation() ──► registry ──► the future is done: removed
//                                                         │
//                                                         └──► pending.h walks from here to what waits for it
//
// A future that no engine made is not in the registry: that would cost more than the future does.
//
// Lock: each part of the registry has a spin lock, held for a few instructions, and by the walk while it takes
// references. No other lock is taken under it.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/weak_future.h"

namespace cudafuture {

class GroupRecord;

constexpr std::int64_t kUnknown = -1;

// Where operations take place: a process group, a worker, a store, a stage of a pipeline. Places are few, and are never
// freed: operations point at them, also after their engine has ended.
struct OperationPlace {
  std::string kind;  // "group", "worker", "store", "stage" and others
  std::string name;
  std::string text;                 // for messages, such as "of group 'dp'"; empty: names of operations have it
  GroupRecord* progress = nullptr;  // of a group; null: none is kept
  bool is_counted = true;           // registered operations count in the progress; false: their engine counts them

  // Returns the place with this kind, name and preposition, always the same one.
  static OperationPlace& find(const std::string& kind, const std::string& name, const std::string& preposition);
  // Makes a place for a group: another group may have had the name before.
  static OperationPlace& make(const std::string& kind, const std::string& name, const std::string& preposition);
};

// The facts about one operation. Its name and its age are those of its future.
struct OperationFacts {
  const OperationPlace* place = nullptr;  // null: none
  std::int64_t number = kUnknown;         // in the order of the place, from 0
  std::int64_t bytes = kUnknown;
  std::int64_t peer = kUnknown;  // of a message: the rank of its other end in the group
};

// Returns text such as " #12 of group 'dp' (4 MiB)" or " with rank 3 of group 'dp'", which follows the name of the
// operation.
std::string text_of(const OperationFacts& facts);

// An entry of the registry. It has a weak reference to its future, which owns it.
class RegisteredOperation {
 public:
  RegisteredOperation(Future& future, const OperationFacts& facts) noexcept;  // not yet in the registry
  ~RegisteredOperation() { end(); }
  RegisteredOperation(const RegisteredOperation&) = delete;
  RegisteredOperation& operator=(const RegisteredOperation&) = delete;

  const OperationFacts& facts() const noexcept { return facts_; }
  // Adds the operation, which its future has by now, to the registry.
  void begin() noexcept;
  // Removes the operation from the registry. Any thread may call it, more than once.
  void end() noexcept;

  // Returns the futures of all operations in the registry.
  static std::vector<WeakFuture> all();

 private:
  struct Part;

  Future& future_;
  const OperationFacts facts_;
  Part& part_;
  RegisteredOperation* next_ = nullptr;   // guarded by the lock of the part, like the rest
  RegisteredOperation** link_ = nullptr;  // that points at this one; null: it is not in the registry
};

}  // namespace cudafuture
