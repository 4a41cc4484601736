// Stores and buffer pools for other extension modules; see store/store_access.h.
#include "store/store_access.h"

#include <nanobind/stl/shared_ptr.h>

#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind/store.h"
#include "core/error.h"
#include "core/thread_cache.h"
#include "io/buffer_pool.h"
#include "io/checksum.h"
#include "io/failure.h"
#include "store/function_continuation.h"
#include "store/store.h"

namespace cudafuture::bind {
namespace {

using io::BufferPool;
using io::Failure;
using io::FailureKind;
using store::Call;
using store::CallPtr;
using store::EntryPtr;
using store::FoundTensor;
using store::Problem;
using Full = io::Engine::Full;

Problem::Kind kind_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::storage:
      return Problem::Kind::storage;
    case FailureKind::checksum:
      return Problem::Kind::checksum;
    case FailureKind::quota:
      return Problem::Kind::quota;
    case FailureKind::not_found:
      return Problem::Kind::not_found;
  }
  return Problem::Kind::other;
}

Problem problem_of(const std::exception_ptr& error) {
  Problem problem;
  try {
    std::rethrow_exception(error);
  } catch (const Failure& e) {
    problem = {kind_of(e.kind()), e.what(), e.path(), e.code(), e.offset(), e.wanted(), e.got()};
  } catch (const Error& e) {
    const bool is_state = e.kind() == ErrorKind::invalid_state;
    problem.kind = is_state ? Problem::Kind::invalid_state : Problem::Kind::other;
    problem.message = e.what();
  } catch (const std::bad_alloc&) {
    problem.kind = Problem::Kind::memory;
    problem.message = "the service has no memory for this operation";
  } catch (const std::exception& e) {
    problem.message = e.what();
  }
  return problem;
}

CallPtr call_for(Call::Kind kind, const std::string& name, store::StoreAccess::Done done) {
  CallPtr call = new_call(kind, name, 0);
  store::then(call->future, [done = std::move(done)](Future& ended) {
    const std::exception_ptr error = store::error_of(ended);
    if (error == nullptr) return done(nullptr);
    const Problem problem = problem_of(error);
    done(&problem);
  });
  return call;
}

// Runs a function that begins a call; an exception of the function fails the call.
template <class Begin>
void begin(const CallPtr& call, Begin&& function) {
  try {
    function();
  } catch (...) {
    call->future->fail(Value::of_error(std::current_exception()));
  }
}

class StoreAdapter final : public store::StoreAccess {
 public:
  explicit StoreAdapter(StorePtr store) : store_(std::move(store)) {}

  bool is_closed() const noexcept override { return store_->is_closed(); }

  std::optional<FoundTensor> find(const std::string& key) override {
    const EntryPtr entry = store_->find(key);
    if (entry == nullptr) return std::nullopt;
    const io::Shape& shape = entry->shape;
    return FoundTensor{shape.dtype,   {shape.sizes.begin(), shape.sizes.end()},
                       entry->size(), entry->digest,
                       entry->seed,   entry->has_digest,
                       entry};
  }

  void read(const std::vector<store::PartRead>& parts, Done done) override {
    const CallPtr call = call_for(Call::Kind::read, "read", std::move(done));
    store::ReadList reads;
    for (const store::PartRead& part : parts) {
      io::Memory memory;
      memory.add(part.into, part.size);
      const auto entry = std::static_pointer_cast<const store::Entry>(part.tensor->entry);
      reads.push_back({call, "", entry, std::move(memory), part.digest, part.begin, part.digest != nullptr});
    }
    begin(call, [&] { store_->read(std::move(reads), call, Full::exceed); });
  }

  void write(const store::TensorWrite& tensor, Done done) override {
    const CallPtr call = call_for(Call::Kind::write, tensor.key, std::move(done));
    io::Memory memory;
    memory.add(const_cast<std::byte*>(tensor.from), tensor.size);
    store::WriteList writes;
    writes.push_back({call,
                      tensor.key,
                      {tensor.dtype, {tensor.sizes->begin(), tensor.sizes->end()}},
                      std::move(memory),
                      0,
                      tensor.digest,
                      nullptr});
    begin(call, [&] { store_->write(std::move(writes), call, Full::exceed); });
  }

  void erase(const std::vector<std::string>& keys, Done done) override {
    const CallPtr call = call_for(Call::Kind::deletion, "delete", std::move(done));
    begin(call, [&] { store_->erase(keys, call); });
  }

  std::uint64_t digest(const void* data, std::size_t size) const noexcept override { return io::digest_of(data, size); }

  void call_elsewhere(std::function<void()> function) override {
    ThreadCache::get().run_or_call("cudafuture-task", std::move(function));
  }

 private:
  const StorePtr store_;
};

// A request to a pool, with a flag for whether the call that made it has returned.
struct Taking {
  std::mutex mutex;
  bool has_returned = false;
  bool is_served = false;
};

class PoolAdapter final : public store::PoolAccess {
 public:
  explicit PoolAdapter(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}

  std::function<void()> take(std::uint64_t size, Taken taken) override {
    const auto loan = std::make_shared<BufferPool::Loan>();
    const auto future = c10::make_intrusive<Future>();
    const auto taking = std::make_shared<Taking>();
    // A buffer that returns serves the next request inside a destructor, which may hold any lock.
    store::then(future, [loan, taking, taken](Future& done) {
      const std::exception_ptr error = store::error_of(done);
      std::unique_lock lock(taking->mutex);
      taking->is_served = true;
      if (!taking->has_returned) return;
      lock.unlock();
      ThreadCache::get().run_or_call("cudafuture-task", [loan, taken] { taken(std::move(loan->tensor)); });
    });
    try {
      pool_->take({size, loan, {}, future});
    } catch (const Error&) {  // the pool is closed
      future->fail(Value::of_error(std::current_exception()));
    }
    bool is_served = false;
    {
      const std::lock_guard lock(taking->mutex);
      is_served = taking->is_served;
      taking->has_returned = true;
    }
    if (!is_served) return [future] { future->cancel(); };
    taken(std::move(loan->tensor));
    return {};
  }

 private:
  const std::shared_ptr<BufferPool> pool_;
};

// Returns a capsule of a shared pointer. A copy of that pointer can be dropped without the capsule and without the GIL.
template <class Access>
nb::capsule capsule_of(std::shared_ptr<Access> access, const char* name) {
  using Pointer = std::shared_ptr<Access>;
  auto held = std::make_unique<Pointer>(std::move(access));
  nb::capsule capsule(held.get(), name, [](void* pointer) noexcept { delete static_cast<Pointer*>(pointer); });
  held.release();
  return capsule;
}

}  // namespace

nb::capsule access_to_store(const StorePtr& self) {
  return capsule_of<store::StoreAccess>(std::make_shared<StoreAdapter>(self), "StoreAccess of cudafuture");
}

nb::capsule access_to_pool(std::shared_ptr<BufferPool> self) {
  return capsule_of<store::PoolAccess>(std::make_shared<PoolAdapter>(std::move(self)), "PoolAccess of cudafuture");
}

}  // namespace cudafuture::bind
