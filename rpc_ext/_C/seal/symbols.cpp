#include "seal/symbols.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace rpc_ext {
namespace {

#if defined(__x86_64__)
constexpr auto call_slot = R_X86_64_JUMP_SLOT, data_slot = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr auto call_slot = R_AARCH64_JUMP_SLOT, data_slot = R_AARCH64_GLOB_DAT;
#else
constexpr auto call_slot = ~0u, data_slot = ~0u;  // none is found
#endif

struct Search {
  std::string_view library;
  std::string_view symbol;
  const void* to;
  std::size_t changed = 0;
};

struct Dynamic {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * calls = nullptr;
  std::size_t calls_size = 0;
  const ElfW(Rela) * others = nullptr;
  std::size_t others_size = 0;
};

Dynamic dynamic_of(const dl_phdr_info& object) {
  Dynamic found;
  for (int i = 0; i < object.dlpi_phnum; i++) {
    if (object.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (auto entry = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
         entry->d_tag != DT_NULL; entry++) {
      const ElfW(Addr) at = entry->d_un.d_ptr;  // glibc has added the library's address already
      switch (entry->d_tag) {
        case DT_SYMTAB:
          found.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
          break;
        case DT_STRTAB:
          found.names = reinterpret_cast<const char*>(at);
          break;
        case DT_JMPREL:
          found.calls = reinterpret_cast<const ElfW(Rela)*>(at);
          break;
        case DT_PLTRELSZ:
          found.calls_size = entry->d_un.d_val / sizeof(ElfW(Rela));
          break;
        case DT_RELA:
          found.others = reinterpret_cast<const ElfW(Rela)*>(at);
          break;
        case DT_RELASZ:
          found.others_size = entry->d_un.d_val / sizeof(ElfW(Rela));
          break;
        default:
          break;
      }
    }
  }
  return found;
}

// Returns true if the linker has made this part of a library read-only after relocation: whole pages only.
bool is_read_only(const dl_phdr_info& object, ElfW(Addr) at) {
  const auto page_size = static_cast<ElfW(Addr)>(::sysconf(_SC_PAGESIZE));
  for (int i = 0; i < object.dlpi_phnum; i++) {
    const auto& header = object.dlpi_phdr[i];
    const ElfW(Addr) begin = object.dlpi_addr + header.p_vaddr;
    const ElfW(Addr) end = (begin + header.p_memsz) / page_size * page_size;
    if (header.p_type == PT_GNU_RELRO && at >= begin && at < end) return true;
  }
  return false;
}

bool write(const dl_phdr_info& object, ElfW(Addr) at, const void* to) {
  const auto page_size = static_cast<ElfW(Addr)>(::sysconf(_SC_PAGESIZE));
  auto* const page = reinterpret_cast<void*>(at / page_size * page_size);
  const bool read_only = is_read_only(object, at);
  if (read_only && ::mprotect(page, page_size, PROT_READ | PROT_WRITE) != 0) return false;
  std::atomic_ref(*reinterpret_cast<std::uintptr_t*>(at)).store(reinterpret_cast<std::uintptr_t>(to));
  if (read_only) ::mprotect(page, page_size, PROT_READ);
  return true;
}

void change(const dl_phdr_info& object, const Dynamic& in, const ElfW(Rela) * slots, std::size_t count,
            Search& search) {
  for (std::size_t i = 0; i < count; i++) {
    const auto type = ELF64_R_TYPE(slots[i].r_info);
    if (type != call_slot && type != data_slot) continue;
    if (search.symbol != in.names + in.symbols[ELF64_R_SYM(slots[i].r_info)].st_name) continue;
    search.changed += write(object, object.dlpi_addr + slots[i].r_offset, search.to) ? 1 : 0;
  }
}

int visit(dl_phdr_info* object, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const std::string_view file = object->dlpi_name;
  if (file.substr(file.rfind('/') + 1).find(search.library) == std::string_view::npos) return 0;
  const Dynamic found = dynamic_of(*object);
  if (found.symbols && found.names) {
    change(*object, found, found.calls, found.calls_size, search);
    change(*object, found, found.others, found.others_size, search);
  }
  return 0;
}

}  // namespace

std::size_t redirect(const char* library, const char* symbol, const void* to) {
  Search search{library, symbol, to};
  ::dl_iterate_phdr(visit, &search);
  return search.changed;
}

}  // namespace rpc_ext
