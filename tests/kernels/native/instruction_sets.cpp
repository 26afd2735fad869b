// Checks every instruction set that the machine offers against plain scalar code, without Python: small enough for an
// emulator of a processor that is not at hand. Prints a line per part; the exit code is 1 if anything differs.
//
//   c++ -std=c++17 -O2 -I src/forerun/kernels/cpu tests/kernels/native/instruction_sets.cpp
//       src/forerun/kernels/cpu/libforerun_cpu.so -Wl,-rpath,$PWD/src/forerun/kernels/cpu -o instruction_sets
//   ./instruction_sets [avx2 | avx512 | amx]...
//
// Quantised products must have the very bits that kernels/quantized.py promises, float products those of a chain of
// fused multiply-adds (but bfloat16 on AMX, whose sums have another order); the rest is compared with double precision.
#include "passes.h"
#include "products.h"

namespace {

void check_machine(const Machine& machine) {
    check_gate(machine);
    check_embedding(machine);
    {
        Part part(machine.isa, machine.threads, "rotation");
        for (long size : {8, 64, 72, 256})
            for (int32_t format : {FLOAT32, BFLOAT16, INT8})
                for (int kind = 0; kind < 4; ++kind)
                    check_rotation(machine, size, size / (kind & 2 ? 4 : 2), format, kind & 1, part);
    }
    {
        Part part(machine.isa, machine.threads, "attention");
        for (int32_t format : {FLOAT32, BFLOAT16, INT8})
            for (Heads heads : {Heads{9, 3, 64}, {4, 4, 72}, {4, 2, 256}, {16, 1, 40}, {64, 1, 8}}) {
                check_attention(machine, heads, 0, 0, format, part);
                check_attention(machine, heads, 40, 20, format, part);
            }
    }
    check_projection(machine);
    check_mixture(machine);
    check_products(machine);
}

}  // namespace

int main(int argc, char** argv) {
    const char* names[] = {"avx2", "avx512", "amx"};
    int supported = forerun_supported();
    printf("instruction sets:");
    for (int i = 0; i < 3; ++i)
        if (supported >> i & 1) printf(" %s", names[i]);
    printf("\n");
    for (int i = 0; i < 3; ++i) {
        bool wanted = argc == 1;
        for (int a = 1; a < argc; ++a) wanted |= strcmp(argv[a], names[i]) == 0;
        if (!wanted) continue;
        if (!(supported >> i & 1)) {
            if (argc > 1) printf("%s is not to be had here\n", names[i]), ++Part::failures;
            continue;
        }
        for (int threads : {1, 2}) {
            Machine machine = {names[i], threads, forerun_create(i, threads)};
            if (!machine.context) return 2;
            check_machine(machine);
            forerun_destroy(machine.context);
        }
    }
    printf("%ld values are wrong\n", Part::failures);
    return Part::failures ? 1 : 0;
}
