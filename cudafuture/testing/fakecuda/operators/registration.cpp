// Registration: when this library is loaded, every operator that torch has a CUDA kernel for is redirected to its
// kernel for the host, if there is one.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdlib>
#include <set>
#include <string>

#include "fakecuda/control/control.h"
#include "fakecuda/operators/copy.h"
#include "fakecuda/operators/kernel.h"
#include "fakecuda/operators/redirect.h"
#include "fakecuda/operators/site.h"

namespace fakecuda {
namespace {

// Operators whose CUDA kernels launch nothing, or nothing but copies: they run as they are.
const std::set<std::string>& kept() {
  static const std::set<std::string> names = {
      "aten::_efficientzerotensor",
      "aten::_local_scalar_dense",
      "aten::_pin_memory",
      "aten::_reshape_alias",
      "aten::_resize_output_",
      "aten::as_strided",
      "aten::copy_",
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::is_pinned",
      "aten::is_set_to",
      "aten::record_stream",
      "aten::resize_",
      "aten::set_",
      "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor",
      "aten::unfold",
      "aten::view",
      "aten::view_as_complex",
      "aten::view_as_real",
  };
  return names;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

bool is_to_be_redirected(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0 || kept().count(c10::toString(name)) != 0) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) && !is_view(op->schema());
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Returns how many operators were redirected.
int redirect_all() {
  NoWarnings no_warnings;  // torch warns of each kernel that is replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  int redirected = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_to_be_redirected(name)) continue;
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&redirect>());
    ++redirected;
  }
  library->impl("copy_", TORCH_FN(copy));
  return redirected;
}

int load() {
  install_sites();
  // Before torch's libraries destroy what kernels use: this library was loaded after them.
  std::atexit(fakecuda_stop);
  const int count = redirect_all();
  fakecuda_set_operators_redirected();
  return count;
}

const int redirected = load();

}  // namespace
}  // namespace fakecuda

extern "C" int fakecuda_redirected_operators() { return fakecuda::redirected; }
