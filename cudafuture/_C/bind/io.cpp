#include "bind/io.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unordered_map.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/tensors.h"
#include "core/process.h"
#include "io/aligned.h"
#include "io/engine.h"

namespace cudafuture::bind {
namespace {

using io::Access;
using io::Direct;
using io::Direction;
using io::Engine;
using io::File;
using io::Start;

constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

// Reads or writes tensors consecutively from `offset` on. The future keeps them until it is done.
nb::object transfer(EngineHandle& self, const std::shared_ptr<File>& file, bool reads, nb::list tensors,
                    std::uint64_t offset, const std::string& name, int priority) {
  const ParkingScope parking;
  refuse_after_fork();
  io::Request request;
  request.direction = reads ? Direction::read : Direction::write;
  request.file = file;
  request.offset = offset;
  Tensors taken = take_tensors(tensors, request.direction, expect_priority(priority));
  for (io::Memory& memory : taken.memory) request.memory.add(std::move(memory));
  request.device = std::move(taken.device);
  request.future = c10::make_intrusive<Future>(priority);
  request.future->set_name(name);
  if (!reads) request.future->promise_release();
  if (request.memory.size() > kMostBytes - std::min(offset, kMostBytes)) {
    throw nb::value_error("the offset and the size of the tensors reach beyond the end of the largest file");
  }
  wait_for_room(*self.engine);
  request.future->set_operation({nullptr, kUnknown, static_cast<std::int64_t>(request.memory.size())});
  nb::object result = wrap(request.future);
  if (request.device != nullptr) taken.keep.append(result);  // its tensors must not be freed on the engine's thread
  request.keep = foreign(std::move(taken.keep));
  {
    const WithoutGil released;
    self.engine->submit(std::move(request));
  }
  return result;
}

EngineHandle start_engine(const std::string& backend, std::size_t queue_depth, std::size_t block_size,
                          std::size_t threads, std::size_t max_pending, std::optional<io::FaultRates> faults) {
  Engine::Options options;
  if (backend == "io_uring") options.backend = io::BackendKind::io_uring;
  if (backend == "threads") options.backend = io::BackendKind::threads;
  options.queue_depth = queue_depth;
  options.block_size = block_size;
  options.threads = threads;
  options.max_pending = max_pending;
  options.faults = faults;
  const WithoutGil released;
  return EngineHandle(Engine::start(options));
}

nb::dict engine_statistics(const EngineHandle& self) {
  const Engine::Statistics s = self.engine->statistics();
  nb::dict d;
  d["reads"] = s.reads;
  d["writes"] = s.writes;
  d["bytes_read"] = s.bytes_read;
  d["bytes_written"] = s.bytes_written;
  d["blocks"] = s.blocks;
  d["again"] = s.again;
  d["staged"] = s.staged;
  d["copied"] = s.copied;
  d["pending"] = s.pending;
  return d;
}

std::shared_ptr<File> open_file(const std::string& path, const std::string& mode, std::optional<bool> direct) {
  const WithoutGil released;
  const Access access = mode == "r" ? Access::read : mode == "w" ? Access::write : Access::read_write;
  const Start start = mode[0] == 'w' ? Start::empty : Start::existing;
  return File::open(path, access, start, !direct ? Direct::automatic : *direct ? Direct::yes : Direct::no);
}

}  // namespace

void bind_storage(nb::module_& m) {
  nb::class_<io::FaultRates>(m, "EngineFaults")
      .def(nb::init<std::uint64_t, double, double, double, double, double, double, bool,
                    std::unordered_map<std::uint64_t, int>>(),
           nb::kw_only(), nb::arg("seed") = 0, nb::arg("io_error") = 0, nb::arg("no_space") = 0, nb::arg("again") = 0,
           nb::arg("interrupted") = 0, nb::arg("cut_short") = 0, nb::arg("late") = 0, nb::arg("held") = false,
           nb::arg("at") = std::unordered_map<std::uint64_t, int>());
  nb::class_<File>(m, "NativeFile")
      .def_prop_ro("is_direct", &File::is_direct)
      .def_prop_ro("unit", &File::unit)
      .def_prop_ro("size", &File::size)
      .def("allocate", &File::allocate, nb::arg("size"), nb::call_guard<nb::gil_scoped_release>())
      .def("truncate", &File::truncate, nb::arg("size"), nb::call_guard<nb::gil_scoped_release>())
      .def("sync", &File::sync, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &File::close);
  nb::class_<EngineHandle>(m, "NativeEngine")
      .def_prop_ro("backend", [](const EngineHandle& self) { return self.engine->backend_name(); })
      .def_prop_ro("why_not_io_uring", [](const EngineHandle& self) { return self.engine->why_not_io_uring(); })
      .def("statistics", engine_statistics)
      .def("transfer", transfer, nb::arg("file"), nb::arg("reads"), nb::arg("tensors"), nb::arg("offset"),
           nb::arg("name"), nb::arg("priority"))
      .def("release_held", [](EngineHandle& self) { self.engine->release_held(); })
      .def("close", [](EngineHandle& self) {
        const ParkingScope parking;
        self.engine->close();
        wait_until_done([&](Engine::Clock::time_point deadline) { return self.engine->join_until(deadline); });
      });
  m.def("start_engine", start_engine, nb::arg("backend"), nb::arg("queue_depth"), nb::arg("block_size"),
        nb::arg("threads"), nb::arg("max_pending"), nb::arg("faults") = nb::none());
  m.def(
      "aligned_bytes", [](std::size_t size) { return nb::steal(THPVariable_Wrap(io::make_aligned_bytes(size))); },
      nb::arg("size"));
  m.def("open_file", open_file, nb::arg("path"), nb::arg("mode"), nb::arg("direct").none());
}

}  // namespace cudafuture::bind
