/* Elementary functions of src/base/functions.h. */

/* Returns the error of `got` in units in the last place of a double. */
static double units_of_error(double got, long double exact)
{
    int exponent;
    frexpl(exact, &exponent);
    return (double)(fabsl((long double)got - exact) / ldexpl(1, (exponent < -1021 ? -1021 : exponent) - 53));
}

/* Compares with the C library's functions of long double, which have 11 more bits on x86. */
TEST(functions_of_every_system)
{
    enum { POINTS = 40000 };
    double max[5] = {0, 0, 0, 0, 0};
    if (LDBL_MANT_DIG < 64) SKIP("long double is not longer than double here");
    for (uint32_t k = 0; k < POINTS; k++) {
        const uint32_t counter[4] = {k, 0, 0, 0};
        uint32_t drawn[4];
        tt__philox(counter, 1, drawn);
        const double u = tt__uniform(drawn[0]), v = tt__uniform(drawn[1]);
        const double x = k % 2 ? 4 * u - 2 : 1400 * u - 700; /* small and large arguments in turn */
        const double y = k % 2 ? 3 * u : exp(1000 * u - 500), angle = k % 2 ? 7 * v : 2000 * v - 1000;
        const double small = exp(-60 * u), bounds[5] = {1, 1, 2, 2, 3};
        const double errors[5] = {
            units_of_error(tt__exp(x), expl(x)), units_of_error(tt__ln(y), logl(y)),
            units_of_error(tt__sin(angle), sinl(angle)), units_of_error(tt__cos(angle), cosl(angle)),
            units_of_error(tt__ln1p(small), log1pl(small))};
        for (int f = 0; f < 5; f++) {
            max[f] = fmax(max[f], errors[f]);
#ifdef _WIN32 /* sinl and cosl of MinGW lose bits near multiples of pi */
            if (f == 2 || f == 3) continue;
#endif
            if (!(errors[f] <= bounds[f])) CHECK_NEAR(errors[f], 0, bounds[f]);
        }
    }
    if (getenv("TINYTRAIN_TEST_VERBOSE"))
        printf("largest errors: exp %.2f, log %.2f, sin %.2f, cos %.2f, log1p %.2f units\n", max[0], max[1],
               max[2], max[3], max[4]);
    CHECK(tt__exp(0) == 1 && tt__exp(-746) == 0 && tt__exp(710) == HUGE_VAL && tt__exp(-HUGE_VAL) == 0);
    CHECK(tt__exp(-745) > 0 && isnan(tt__exp(NAN)) && isnan(tt__ln(NAN)) && isnan(tt__ln(-1)));
    CHECK(tt__ln(1) == 0 && tt__ln(0) == -HUGE_VAL && tt__ln(HUGE_VAL) == HUGE_VAL);
    CHECK(tt__ln1p(0) == 0 && tt__ln1p(0x1p-80) == 0x1p-80 && tt__sin(0) == 0 && tt__cos(0) == 1);
    CHECK_NEAR(tt__pow(0.999, 1000), pow(0.999, 1000), 1e-15);
}
