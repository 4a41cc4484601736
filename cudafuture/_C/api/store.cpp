#include "api/store.h"

#include <nanobind/stl/shared_ptr.h>

#include <exception>
#include <utility>

#include "api/implementation.h"
#include "bind/store.h"
#include "io/aligned.h"
#include "store/function_continuation.h"
#include "store/multipart_write.h"
#include "store/store.h"

namespace cudafuture::api {
namespace {

using bind::StorePtr;
using store::Call;
using store::CallPtr;
using Full = io::Engine::Full;

CallPtr call_for(Call::Kind kind, const std::string& name, Done done) {
  CallPtr call = bind::new_call(kind, name, 0);
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

io::Memory memory_at(const std::byte* data, std::size_t size) {
  io::Memory memory;
  memory.add(const_cast<std::byte*>(data), size);
  return memory;
}

class NativeMultipartWrite final : public MultipartWrite {
 public:
  explicit NativeMultipartWrite(std::shared_ptr<store::MultipartWrite> write) : write_(std::move(write)) {}
  ~NativeMultipartWrite() override { write_->abort(); }
  NativeMultipartWrite(const NativeMultipartWrite&) = delete;
  NativeMultipartWrite& operator=(const NativeMultipartWrite&) = delete;

  void put(std::uint64_t at, const std::byte* from, std::size_t size, std::uint64_t digest, Done done) override {
    if (!write_->has_part(at, size)) throw value_failure(write_->not_a_part(std::to_string(at), size));
    const CallPtr call = call_for(Call::Kind::write, "put a part of " + write_->key(), std::move(done));
    const bool is_new = call_core([&] { return write_->put(at, memory_at(from, size), digest, call, Full::exceed); });
    if (!is_new) throw value_failure(store::MultipartWrite::put_before(at, size));
  }

  void commit(Done done) override {
    const CallPtr call = call_for(Call::Kind::write, "commit the write of " + write_->key(), std::move(done));
    call_core([&] { write_->commit(std::nullopt, call); });
  }

  void abort() noexcept override { write_->abort(); }

 private:
  const std::shared_ptr<store::MultipartWrite> write_;
};

class NativeStore final : public Store {
 public:
  explicit NativeStore(StorePtr store) : store_(std::move(store)) {}

  bool is_closed() const noexcept override { return store_->is_closed(); }

  std::optional<FoundTensor> find(const std::string& key) override {
    const store::EntryPtr entry = store_->find(key);
    if (entry == nullptr) return std::nullopt;
    const io::Shape& shape = entry->shape;
    return FoundTensor{shape.dtype,   {shape.sizes.begin(), shape.sizes.end()},
                       entry->size(), entry->digest,
                       entry->seed,   entry->has_digest,
                       entry};
  }

  void read(const std::vector<PartRead>& parts, Done done) override {
    const CallPtr call = call_for(Call::Kind::read, "read", std::move(done));
    store::ReadList reads;
    for (const PartRead& part : parts) {
      const auto entry = std::static_pointer_cast<const store::Entry>(part.tensor->entry);
      reads.push_back(
          {call, "", entry, memory_at(part.into, part.size), part.digest, part.begin, part.digest != nullptr});
    }
    begin(call, [&] { store_->read(std::move(reads), call, Full::exceed); });
  }

  void write(const TensorWrite& tensor, Done done) override {
    const CallPtr call = call_for(Call::Kind::write, tensor.key, std::move(done));
    store::WriteList writes;
    writes.push_back({call, tensor.key, shape_from(tensor.dtype, *tensor.sizes), memory_at(tensor.from, tensor.size), 0,
                      tensor.digest, nullptr});
    begin(call, [&] { store_->write(std::move(writes), call, Full::exceed); });
  }

  void erase(const std::vector<std::string>& keys, Done done) override {
    const CallPtr call = call_for(Call::Kind::deletion, "delete", std::move(done));
    begin(call, [&] { store_->erase(keys, call); });
  }

  std::shared_ptr<MultipartWrite> begin_write(const std::string& key, c10::ScalarType dtype,
                                              const std::vector<std::int64_t>& sizes) override {
    const io::Shape shape = shape_from(dtype, sizes);
    const std::optional<std::uint64_t> bytes = io::bytes_of(shape);
    if (!bytes) throw value_failure("the tensor has more bytes than the largest file");
    return call_core([&] {
      return std::make_shared<NativeMultipartWrite>(store::MultipartWrite::begin(store_, key, shape, *bytes));
    });
  }

 private:
  const StorePtr store_;
};

}  // namespace

std::shared_ptr<Store> store_of(_object* disk_store) {
  return call_with_gil([&] {
    const bind::nb::handle object(disk_store);
    const bind::nb::object native = bind::nb::getattr(object, "_native", bind::nb::none());
    StorePtr store;
    if (!bind::nb::try_cast(native, store) || store == nullptr) {
      throw bind::nb::type_error(("expected a DiskStore, not " + bind::repr_of(object)).c_str());
    }
    return std::make_shared<NativeStore>(std::move(store));
  });
}

}  // namespace cudafuture::api
