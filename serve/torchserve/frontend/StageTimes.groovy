import groovy.transform.CompileStatic
import io.prometheus.client.Histogram
import java.util.regex.Matcher
import java.util.regex.Pattern
import org.pytorch.serve.wlm.Model

/**
 * Each request's own time by stage, under the name, the labels and the buckets of our own server's histogram. They are read
 * off the header that goes to the client: as metrics of a worker each would be a line that it writes and TorchServe
 * parses, and 0.12 would have no buckets but Prometheus' default ones.
 */
@CompileStatic
class StageTimes {
    private static final Pattern STAGE = Pattern.compile('(\\w+);dur=([0-9.]+)')
    private static final Histogram SECONDS = Histogram.build()
            .name('serve_stage_seconds').help("Where an answered request's time went")
            .labelNames('model', 'version', 'stage')
            .buckets(System.getProperty('serve.stage_buckets').split(',').collect { it as double } as double[])
            .register()

    /** Count an answer by the value of its `Server-Timing`. */
    static void observe(Model model, String timing) {
        for (Matcher stage = STAGE.matcher(timing); stage.find();) {
            SECONDS.labels(model.getModelName(), model.getVersion(), stage.group(1))
                    .observe(Double.parseDouble(stage.group(2)) / 1000d)
        }
    }

    /** A version is gone: its series would be told for as long as the server runs. */
    static void forget(Model model) {
        List<String> gone = [model.getModelName(), model.getVersion()]
        SECONDS.collect()*.samples.flatten().each { sample ->
            List<String> labels = ((io.prometheus.client.Collector.MetricFamilySamples.Sample) sample).labelValues
            if (labels.take(2) == gone) {
                SECONDS.remove(labels.take(3) as String[])
            }
        }
    }
}
